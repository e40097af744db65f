"""bash's side of completion.

bash cuts the words of a line at every character of ``COMP_WORDBREAKS``, which has ``=`` and ``:``, and replaces the last
piece alone. click's own script sends those pieces as words (seen with click 8.5), so that nothing completes after
``-o backend.name=``. This one sends the line as it was typed, and takes back values without what bash keeps of the word.
"""

import os
from typing import Any

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

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
"""``$2`` is the text that bash will replace. No blank follows a path that ends with ``=``: its value comes next."""


class Bash(BashComplete):
    """Completion of the last word of the line up to the cursor, in the pieces that bash replaces."""

    source_template = _SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that is completed, and that one as far as it is typed."""
        line = os.environ["COMP_HEAD"]
        words = split_arg_string(line)
        begun = words.pop() if len(words) > 1 and not line[-1:].isspace() else ""
        return words[1:], begun

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """``type,value``; the value without the part of the word that bash leaves as it is."""
        _, begun = self.get_completion_args()
        replaced = os.environ.get("COMP_REPLACED", "")
        kept = begun.removesuffix(replaced) if begun.endswith(replaced) else ""
        return f"{item.type},{item.value.removeprefix(kept)}"


def register() -> None:
    """Make click use ``Bash`` for the shell of that name."""
    add_completion_class(Bash)
