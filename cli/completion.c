/* kvlag completion: a script for each shell. All of them hand the line up to the cursor to `kvlag completion --line`,
 * and differ in how candidates are given to the shell. A candidate that ends in one of ( = : , | is not the end of a
 * word, so that no blank may follow it. */
#include "base/err.h"
#include "base/options.h"
#include "cli/commands.h"
#include "cli/complete.h"

#include <stdio.h>
#include <string.h>

/* readline replaces $2, what stands behind the last of COMP_WORDBREAKS; a candidate is the whole word, so that its
 * beginning is cut off. Without a quote parentheses get backslashes. A single candidate would have its quote closed,
 * hence the second one. */
static const char bash[] = //
    "# kvlag completion for bash. For this shell: source <(kvlag completion bash)\n"
    "_kvlag() {\n"
    "    local line=${COMP_LINE:0:COMP_POINT} typed=${2//\\\\/} word='' quoted='' candidate help\n"
    "    [[ ${COMP_WORDS[COMP_CWORD]} == [\\'\\\"]* ]] && quoted=1\n"
    "    COMPREPLY=()\n"
    "    while IFS=$'\\t' read -r candidate help; do\n"
    "        case $candidate in\n"
    "        :word) word=$help ;;\n"
    "        :files) compopt -o default ;;\n"
    "        *)\n"
    "            candidate=${candidate#\"${word%\"$typed\"}\"}\n"
    "            [[ $quoted ]] || printf -v candidate %q \"$candidate\"\n"
    "            COMPREPLY+=(\"$candidate\")\n"
    "            ;;\n"
    "        esac\n"
    "    done < <(\"${COMP_WORDS[0]/#\\~/$HOME}\" completion --line \"$line\" 2>/dev/null)\n"
    "    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=\\(:,\\|] ]]; then\n"
    "        compopt -o nospace\n"
    "        [[ $quoted ]] && COMPREPLY+=(\"${COMPREPLY[0]}...\")\n"
    "    fi\n"
    "}\n"
    "complete -F _kvlag kvlag\n";

static const char zsh[] = //
    "#compdef kvlag\n"
    "# kvlag completion for zsh. For this shell: source <(kvlag completion zsh)\n"
    "_kvlag() {\n"
    "    local line=\"${(j: :)words[1,CURRENT-1]} $PREFIX\" candidate help files\n"
    "    local -a whole open whole_shown open_shown\n"
    "    while IFS=$'\\t' read -r candidate help; do\n"
    "        case $candidate in\n"
    "        (:word) ;;\n"
    "        (:files) files=1 ;;\n"
    "        (*[=\\(:,\\|]) open+=(\"$candidate\") open_shown+=(\"$candidate  $help\") ;;\n"
    "        (*) whole+=(\"$candidate\") whole_shown+=(\"$candidate  $help\") ;;\n"
    "        esac\n"
    "    done < <(\"${words[1]/#\\~/$HOME}\" completion --line \"$line\" 2>/dev/null)\n"
    "    (( $#whole )) && compadd -l -d whole_shown -a whole\n"
    "    (( $#open )) && compadd -S '' -l -d open_shown -a open\n"
    "    if [[ -n $files ]]; then\n"
    "        compset -P '--*='\n"
    "        _files\n"
    "    fi\n"
    "}\n"
    "if [[ $funcstack[1] == _kvlag ]]; then _kvlag \"$@\"; else compdef _kvlag kvlag; fi\n";

static const char fish[] = //
    "# kvlag completion for fish. For this shell: kvlag completion fish | source\n"
    "function __kvlag_complete\n"
    "    set -l line (commandline -cp)\n"
    "    set -l program (string replace -r '^~' $HOME (commandline -opc)[1])\n"
    "    for candidate in ($program completion --line \"$line\" 2>/dev/null)\n"
    "        if string match -q ':word*' -- $candidate\n"
    "            continue\n"
    "        else if test \"$candidate\" = :files\n"
    "            set -l word (commandline -ct)\n"
    "            set -l option (string match -r '^--[a-z-]+=' -- $word)\n"
    "            for file in (__fish_complete_path (string replace -- \"$option\" '' $word))\n"
    "                echo \"$option$file\"\n"
    "            end\n"
    "        else\n"
    "            echo $candidate\n"
    "        end\n"
    "    end\n"
    "end\n"
    "complete -c kvlag -f -a '(__kvlag_complete)'\n";

static const struct { const char *name, *script; } shells[] = {{"bash", bash}, {"zsh", zsh}, {"fish", fish}};
enum { N_SHELLS = sizeof shells / sizeof *shells };

static int print_script(const char *name) {
    const char *names[N_SHELLS];
    for (size_t i = 0; i < N_SHELLS; i++) {
        if (strcmp(shells[i].name, name) == 0) return fputs(shells[i].script, stdout) < 0 ? ERR_DATA : 0;
        names[i] = shells[i].name;
    }
    const char *near = opt_nearest(name, names, N_SHELLS);
    return err_set(ERR_USAGE, "completion: '%s' is not one of bash, zsh, fish%s%s%s", name,
                   near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
}

static int print_candidates(const char *line) {
    text out = {0};
    int code = complete_line(line, &out);
    if (!code && out.n) fputs(out.data, stdout);
    text_free(&out);
    return code;
}

int cmd_completion(int argc, char **argv) {
    const char *line = NULL;
    opt_list names = {0};
    const opt table[] = {
        {"line", 0, OPT_TEXT, false, &line, "LINE",
         "print what could come next on a command line up to the cursor, each with a tab and its help", 0, 0},
        {.name = NULL},
    };
    int code = opt_parse(table, argc, argv, &names);
    if (!code && names.n + (line != NULL) != 1)
        code = err_set(ERR_USAGE, "completion: say for which shell: bash, zsh or fish");
    if (!code) code = line ? print_candidates(line) : print_script(names.item[0]);
    opt_list_free(&names);
    return code;
}
