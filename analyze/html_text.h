/* The text as part of an HTML page, each token on a background that says how long it was kept. */
#pragma once

#include "analyze/tokens.h"
#include "base/text.h"

#include <stddef.h>

/* Append the <style> element that html_text_add relies on; once a page, in its head or body. All its rules begin with
 * .kvlag-text, and nothing is loaded from elsewhere. */
int html_text_style(text *html);

/* Append <div class="kvlag-text">: a colour key, a line that says which tokens are shown, and the text, wrapped to the
 * width there is. Each token is a <span class="rN" title="...">, N = 0 .. 10 the tenths of its `kept`; the title gives
 * its position and both shares. Line breaks of the text are kept, behind a mark. `first` is the first token shown,
 * `most` how many at most. Returns 0 or ERR_DATA (memory). */
int html_text_add(text *html, const tokens *t, const token_shares *s, int32_t first, int32_t most);

/* Append words to HTML, with &, <, >, " and ' escaped. */
int html_text_escape(text *html, const char *words);
