"""Completion for bash, in place of click's own, which completes nothing after ``-o backend.name=``."""

import os
from typing import Any

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

# bash splits words at every character of `COMP_WORDBREAKS`, such as `=` and `:`, and replaces the last piece only. click's own
# script sends those pieces as separate words (seen with click 8.5). This one sends the line as it was typed, and the values that
# it receives lack the part of the word that bash keeps.
_SCRIPT = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value
    response=$(env COMP_HEAD="${COMP_LINE:0:COMP_POINT}" COMP_REPLACED="$2" %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
            if [[ $value == *= ]]; then compopt -o nospace; fi
        fi
    done
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""The completion function of bash. ``$2`` is the text that bash will replace."""


class Bash(BashComplete):
    """Completes the last word before the cursor, and returns only the piece of it that bash replaces."""

    source_template = _SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one that is completed, and that word as far as it is typed."""
        line = os.environ["COMP_HEAD"]
        words = split_arg_string(line)
        incomplete = words.pop() if len(words) > 1 and not line[-1:].isspace() else ""
        return words[1:], incomplete

    # Quoted: CompletionItem of click 8.1 is not generic.
    def format_completion(self, item: "CompletionItem[Any]") -> str:
        """Return ``type,value``, where the value lacks the part of the word that bash keeps."""
        _, incomplete = self.get_completion_args()
        replaced = os.environ.get("COMP_REPLACED", "")
        kept_part = incomplete.removesuffix(replaced) if incomplete.endswith(replaced) else ""
        return f"{item.type},{item.value.removeprefix(kept_part)}"


def register() -> None:
    """Make click use ``Bash`` for the shell of that name."""
    add_completion_class(Bash)
