/* Sections of the report that stand in files of their own. What lacks its input adds nothing. */
#pragma once

#include "analyze/report_content.h"

int report_add_text(const report_input *in, report *out);
int report_add_truths(const report_input *in, report *out);
int report_add_method(const report_input *in, report *out);
