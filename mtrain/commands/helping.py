"""The help of commands: their flags in groups, and examples at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from mtrain.spec.suggest import closest

GROUPS: Mapping[str, Sequence[str]] = {
    "Spec": ("config", "overrides"),
    "Training": (
        *("epochs", "batch_size", "learning_rate", "amp", "no_amp", "sync_bn", "seed", "name"),
        *("resume", "eval_too", "dry_run", "quiet", "verbose"),
    ),
    "Backend and devices": ("backend", "devices", "nproc_per_node", "launcher", "log_dir", "max_restarts"),
    "Several hosts": (
        *("ips", "hostfile", "nnodes", "cluster", "node_rank", "master_addr", "master_port", "start_port"),
        *("control_port", "ssh_port", "ssh_identity_file", "failure_timeout_s"),
    ),
    "Flags that YOLOv5 and PaddleDetection have too": (
        *("data", "cfg", "weights", "image_size", "workers", "cache", "noval", "patience", "freeze", "save_period"),
        *("label_smoothing", "cos_lr", "optimizer", "project", "noplots", "multi_scale", "image_weights"),
        *("fleet", "use_vdl"),
    ),
}
"""Heading in the help of a job -> the parameters below it. A parameter that is not listed is the command's own."""

EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "train": (
        ("mtrain", "train ./mtrain.yml, or else the embedded demo"),
        ("mtrain -c yolov5n_bccd --epochs 50 --lr 0.005", "a shipped spec, with two other values"),
        ("mtrain -c spec.yml -b horovod --nproc-per-node 2", "another backend, on two ranks"),
        ("mtrain -c spec.yml --resume", "go on with the newest run of this name"),
        ("mtrain -c spec.yml --cluster ssh -H node1,node2", "start on two hosts from here"),
    ),
    "run": (
        ("mtrain run --nproc-per-node 2 train.py --lr 0.1", "your script on two ranks, with its own --lr"),
        ("mtrain run -b ddp --name first train.py", "the run folder is runs/first"),
    ),
    "plan": (
        ("mtrain plan -c yolov5n_bccd", "the commands, the memory and the facts of each rank"),
        ("mtrain plan -c yolov5n_bccd --diff ddp fleet", "what two backends do differently"),
    ),
    "submit": (
        ("mtrain submit -c spec.yml --cluster slurm --nnodes 2", "give the job to Slurm"),
        ("mtrain status", "its state"),
    ),
    "status": (("mtrain status", "of the newest job"), ("mtrain status --all", "every job that was submitted here")),
    "logs": (("mtrain logs --follow", "of the newest job, until it ends"),),
    "cancel": (("mtrain cancel 4711", "ask job 4711 to save its state and end"),),
    "evaluate": (
        ("mtrain evaluate runs/digits", "the best checkpoint of a run"),
        ("mtrain evaluate -c yolov5s --weights yolov5s.pt", "weights of the original project"),
    ),
    "predict": (
        ("mtrain predict photos/ --run runs/digits", "the best checkpoint of a run on a folder of images"),
        ("mtrain predict a.jpg --weights digits.onnx", "an exported model; no framework is needed"),
    ),
    "export": (
        ("mtrain export runs/digits", "digits.onnx"),
        ("mtrain export runs/digits --form nms --out m.onnx", "an ONNX graph with the suppression in it"),
    ),
    "quantise": (("mtrain quantise runs/digits", "digits-int8.onnx"),),
    "prune": (("mtrain prune runs/digits --target 0.5 --out small", "a network of half the FLOPs"),),
    "serve": (("mtrain serve --weights digits.onnx --port 8080", "answer requests at port 8080 of this machine"),),
    "compare": (
        ("mtrain compare -c vit_digits -b ddp,horovod", "50 updates of each; the first one is the reference"),
        ("mtrain compare -b ddp,deepspeed:stage=3 --script train.py", "your own script on two backends"),
        ("mtrain compare one two", "two folders of `mtrain-trace run`: what parted first, and why"),
    ),
    "report": (("mtrain report runs/digits", "write runs/digits/report.html"),),
    "sweep": (("mtrain sweep -c spec.yml --space space.yml --trials 20", "20 trials from a search space"),),
    "ui": (("mtrain ui", "the runs in ./runs, at http://127.0.0.1:8600"),),
    "config list": (("mtrain config list", "the names that -c takes"),),
    "config show": (
        ("mtrain config show -c yolov5n_bccd --origins", "every value, and where it came from"),
        ("mtrain config show -c yolov5n_bccd --lr 0.005", "the spec with another learning rate"),
    ),
    "config explain": (("mtrain config explain optimizer.learning_rate -c yolov5n_bccd", "one value of a spec"),),
    "config validate": (("mtrain config validate spec.yml", "every mistake, with its line"),),
    "config schema": (("mtrain config schema > spec.schema.json", "for an editor"),),
    "plugins list": (("mtrain plugins list models", "the models that model.name may name"),),
    "plugins show": (("mtrain plugins show yolov5n", "its options"),),
    "plugins new": (("mtrain plugins new backend mine", "a package in ./mtrain-mine"),),
    "plugins test": (("mtrain plugins test ddp --ranks 2", "prove that it trains as solo does"),),
    "data check": (("mtrain data check yolov5n_bccd", "counts, mistakes, and images with their labels"),),
    "data convert": (("mtrain data convert out/ --to yolo -c spec.yml", "the data set of a spec as YOLO files"),),
    "data make digits": (("mtrain data make digits digits/", "handwritten digits as a data set"),),
    "checkpoint list": (("mtrain checkpoint list runs/digits", "in the order of writing"),),
    "checkpoint verify": (("mtrain checkpoint verify runs/digits", "read every byte"),),
    "checkpoint show": (("mtrain checkpoint show runs/digits --arrays", "names and shapes"),),
    "weights import": (("mtrain weights import yolov5s.pt --model yolov5s --to yolov5s.safetensors", ""),),
    "weights export": (
        ("mtrain weights export runs/digits --to digits.pt", "for the original project"),
        ("mtrain weights export runs/digits --format dcp --to digits", "for torch.distributed.checkpoint"),
    ),
    "weights show": (("mtrain weights show yolov5s.pt", "nothing in the file is executed"),),
    "doctor": (("mtrain doctor --quick", "this host, without the all-reduce of each backend"),),
    "completion": (("mtrain completion bash >> ~/.bashrc", "complete commands, flags and keys with the tab key"),),
}
"""Command -> examples, and what each one does."""


class Command(click.Command):
    """A command whose help shows its flags in groups, and examples at the end."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; an error of the parser knows the command, which click leaves out in some."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags, in groups where there are many, and then the examples."""
        # Arguments are in the usage line and in the text above; click 8.3 and later list their bare names once more.
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        rows = [(each, row) for each in options if (row := each.get_help_record(ctx)) is not None]
        for heading, entries in sections(rows).items():
            with formatter.section(heading):
                formatter.write_dl(entries)
        self._format_examples(ctx, formatter)

    @staticmethod
    def _format_examples(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        examples = EXAMPLES.get(path_of(ctx), ())
        if not examples:
            return
        with formatter.section("Examples"):
            width = max(len(line) for line, _ in examples)
            indent = " " * formatter.current_indent
            fits = all(width + len(f"{indent}  # {meaning}") <= formatter.width for _, meaning in examples)
            for line, meaning in examples:
                if fits:
                    formatter.write(f"{indent}{line:{width}}  # {meaning}".rstrip(" #") + "\n")
                else:
                    formatter.write((f"{indent}# {meaning}\n" if meaning else "") + f"{indent}{line}\n")


def sections(rows: Sequence[tuple[click.Option, tuple[str, str]]]) -> dict[str, list[tuple[str, str]]]:
    """Divide the flags of a command by ``GROUPS``, with their rows of the help; one section where it has few flags of jobs."""
    names = {option.name for option, _ in rows}
    if len(names & set(GROUPS["Several hosts"])) < 4:
        return {"Options": [row for _, row in rows]}
    # `--weights` of a command that has `--checkpoint` too is its own, and no flag of YOLOv5's training.
    own = {"weights"} if "checkpoint" in names else set()
    heading_of = {name: heading for heading, names in GROUPS.items() for name in names if name not in own}
    sections: dict[str, list[tuple[str, str]]] = {"Options": [], **{heading: [] for heading in GROUPS}}
    for option, row in rows:
        sections[heading_of.get(option.name or "", "Options")].append(row)
    if len(sections["Options"]) == 1:  # `--help` alone: the spec comes first.
        sections["Other"] = sections.pop("Options")
    return {heading: entries for heading, entries in sections.items() if entries}


class Group(click.Group):
    """A group of commands whose help has examples; an unknown word gets a suggestion."""

    command_class = Command
    group_class = type

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first sentence of its help, which click would cut off."""
        with formatter.section("Commands"):
            formatter.write_dl(self.lines())

    def lines(self) -> list[tuple[str, str]]:
        """Return name and line of each command, for the help."""
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        return [(name, command.get_short_help_str(limit=200)) for name, command in shown.items()]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names.

        Raises:
            click.UsageError: there is none; the message names the most similar one, or all.
        """
        if (
            args
            and not ctx.resilient_parsing
            and not args[0].startswith("-")
            and args[0] not in self.list_commands(ctx)
        ):
            ctx.fail(unknown_command(args[0], self.list_commands(ctx), path_of(ctx)))
        return super().resolve_command(ctx, args)


def path_of(ctx: click.Context) -> str:
    """Return the command of a context without the program's name, such as ``config show``."""
    return " ".join(ctx.command_path.split()[1:])


def unknown_command(word: str, known: Sequence[str], group: str = "") -> str:
    """Return the message about a word that names no command."""
    best = closest(word, known)
    where = f"{group} has no command {word!r}" if group else f"no command {word!r}"
    return where + (f"; did you mean {best!r}?" if best else f"; commands: {', '.join(known)}")


def usage(ctx: click.Context) -> str:
    """Return the usage line of a command, such as ``mtrain predict [OPTIONS] IMAGE|FOLDER ...``."""
    pieces: list[Any] = ctx.command.collect_usage_pieces(ctx)
    return " ".join((ctx.command_path, *pieces))
