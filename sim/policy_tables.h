/* `kvlag policies --markdown`: the tables at the end of docs/policies.md. */
#pragma once

void policy_tables_print(void);
