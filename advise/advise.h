/* kvlag advise TRACE... -o DIR: sim and analyze in one step, since they are what one question needs. It stands above
 * both and holds nothing of its own but the choice of what to ask. */
#pragma once

/* See kvlag.c for the convention of cmd_ functions. DIR gets results.csv with its blocks file, lifetimes.h5 of a few
 * policies (one trace), and what analyze writes. */
int cmd_advise(int argc, char **argv);
