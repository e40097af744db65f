"""Hostile host names, paths and values: what a real shell, and a real ssh, makes of the commands that are sent to other
hosts."""

import os
import shutil
import socket
import subprocess
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mtrain.errors import UsageError
from mtrain.launchers.clusters.ssh import LONGEST_BYTES, remote_command
from mtrain.spec.hostnames import checked_host, checked_user

pytestmark = pytest.mark.smoke

SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "ksh", "fish") if shutil.which(shell)]
HOSTILE = [
    "", " ", "'", "''", "\\", "\\'", "'\\''", '"', "$HOME", "$(touch /tmp/owned)", "`id`", "a;b", "a&&b", "a|b", ">x", "!x", "!!",
    "#x", "~", "~root", "{a,b}", "*", "?", "[a]", "a\nb", "\n", "\r\n", "\t", "%1", "=ls", "-n", "--", "\x7f\x1b[31m", "ä 猫 🐈",
    "\udcff\udc80", "\\n", "'; rm -rf /nonexistent; '", "${IFS}", "a=b", "(", "^", "\\\n",
]  # fmt: skip
PRINTF, PRINTENV = (shutil.which(name) or name for name in ("printf", "printenv"))
anything = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=40).filter(
    lambda text: encodes(text)
)
nasty = st.text(st.sampled_from("'\"\\$`!~#;&|<>(){}[]*?=% \t\n-a\udcff"), max_size=12)
words = st.lists(st.one_of(anything, nasty, st.sampled_from(HOSTILE)), max_size=6)


def encodes(text: str) -> bool:
    try:
        return os.fsdecode(os.fsencode(text)) == text
    except UnicodeEncodeError:
        return False


def spoken(shell: str, line: str) -> list[str]:
    """Return the output of a program that prints its arguments, each ended by NUL, run through ``shell -c``."""
    process = subprocess.run([shell, "-c", line], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert process.stderr == b""
    return [os.fsdecode(part) for part in process.stdout.split(b"\0")[:-1]]


@pytest.mark.job
@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_words=words)
@example(given_words=HOSTILE)
def test_a_shell_reads_back_exactly_the_given_arguments(shell, given_words):
    assert spoken(shell, remote_command([PRINTF, "%s\\0", "first", *given_words])) == ["first", *given_words]


@pytest.mark.job
@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=60, deadline=None)
@given(value=st.one_of(anything, nasty))
def test_a_shell_reads_back_exactly_the_given_variables(shell, value):
    env = {"MTRAIN_A": value, "MTRAIN_B": f"{value}'{value}"}
    line = remote_command([PRINTENV, "--null", "MTRAIN_A", "MTRAIN_B"], env)
    assert spoken(shell, line) == [value, f"{value}'{value}"]


@pytest.mark.job
@pytest.mark.parametrize("shell", SHELLS)
def test_a_program_whose_path_looks_like_a_variable_is_run(tmp_path, shell):
    program = tmp_path / "a=b 'c" / "show"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$MTRAIN_A" "$@"\n')
    program.chmod(0o700)
    assert spoken(shell, remote_command([str(program), "x y"], {"MTRAIN_A": "1'"})) == ["1'", "x y"]


@pytest.mark.job
def test_the_command_takes_the_place_of_the_shell():
    """A signal that ssh delivers must not end the shell alone."""
    line = remote_command(["/bin/sh", "-c", "echo $$"], {"A": "b c"})
    with subprocess.Popen(["/bin/sh", "-c", line], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid


@pytest.mark.parametrize(
    "host", ["a", "node-1.rack_2.example.com", "10.0.0.1", "fd00::1", "fe80::1%eth0", "::1", "A" * 253]
)
def test_hosts_are_taken(host):
    assert checked_host(host) == host


@pytest.mark.parametrize(
    "host",
    ["", "-oProxyCommand=id", "-", "a b", "a\n", "\na", "a\0", "a;id", "$(id)", "`id`", "me@a", "ssh://a", "a:22", "a/b", "a%h",
     "fe80::1%;id", "fe80::1%", "ä.example", "a'", 'a"', "a\\", "a|b", "a,b", "a*", "~", "[::1]", "a\x7f", "A" * 254, "a-",
     "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "256.1.1.1", "1", "10.0"],
)  # fmt: skip
def test_what_is_no_host_is_refused_in_one_line(host):
    with pytest.raises(UsageError, match="expected a name of ASCII letters") as caught:
        checked_host(host)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@given(host=st.one_of(anything, nasty, st.sampled_from(HOSTILE)))
def test_no_host_that_is_taken_can_say_more_than_a_name(host):
    try:
        checked_host(host)
    except UsageError:
        return
    assert host.isascii()
    assert host.isprintable()
    assert not host.startswith("-")
    assert not set(host) & set(" '\"\\$`;&|<>(){}[]*?~#!@/,=")


@pytest.mark.parametrize("user", ["", "-l", "a b", "a;b", "$(id)", "a\n", "me@host", "x" * 33])
def test_what_is_no_login_name_is_refused(user):
    with pytest.raises(UsageError, match="login name"):
        checked_user(user)


def test_a_login_name_is_taken():
    assert checked_user("train-1.a_b") == "train-1.a_b"


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        ([], {}, "expected the name or path of a program"),
        ([""], {}, "expected the name or path of a program"),
        (["-c", "x"], {}, "expected the name or path of a program"),
        (["x", "a\0b"], {}, "argument 1 of a command: holds a NUL"),
        (["x"], {"A": "a\0b"}, "the value of A: holds a NUL"),
        (["x"], {"A;id": "1"}, "expected letters, digits and _"),
        (["x"], {"A=B": "1"}, "expected letters, digits and _"),
        (["x"], {"-i": "1"}, "expected letters, digits and _"),
        (["x"], {"": "1"}, "expected letters, digits and _"),
        (["x", "\ud800"], {}, "a character that is no text"),
        (["x", "y" * LONGEST_BYTES], {}, "more than a login shell takes"),
    ],
)
def test_what_no_command_can_hold_is_refused(argv, env, message):
    with pytest.raises(UsageError, match=message):
        remote_command(argv, env)


# ------------------------------------------------------------------------------------------------------------ real ssh
@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """The argv of ``ssh`` to a server of this test's own on the loopback address."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
    if server is None or shutil.which("ssh") is None or os.geteuid() != 0:
        pytest.skip("needs OpenSSH's server and client, and root to run the server")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "HostKey": folder / "host", "AuthorizedKeysFile": folder / "authorized", "ListenAddress": "127.0.0.1", "Port": port,
        "PidFile": folder / "pid", "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "prohibit-password",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    log = (folder / "log").open("wb")
    with subprocess.Popen([server, "-D", "-e", "-f", folder / "config"], stderr=log) as process:
        for _ in range(100):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        known_names = folder / "known"
        known_names.write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
        yield [
            "ssh", "-F", "none", "-p", str(port), "-i", str(folder / "user"), "-o", "BatchMode=yes",
            "-o", f"UserKnownHostsFile={known_names}", "--", "127.0.0.1",
        ]  # fmt: skip
        process.terminate()
    log.close()


@pytest.mark.slow
def test_ssh_carries_hostile_arguments_and_values_whole(ssh):
    line = remote_command([PRINTF, "%s\\0", *HOSTILE])
    process = subprocess.run([*ssh, line], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert [os.fsdecode(part) for part in process.stdout.split(b"\0")[:-1]] == HOSTILE
    env = {f"MTRAIN_{i}": value for i, value in enumerate(HOSTILE)}
    line = remote_command([PRINTENV, "--null", *env], env)
    process = subprocess.run([*ssh, line], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert [os.fsdecode(part) for part in process.stdout.split(b"\0")[:-1]] == HOSTILE


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_words=words)
def test_ssh_carries_any_arguments(ssh, given_words):
    line = remote_command([PRINTF, "%s\\0", "first", *given_words])
    process = subprocess.run([*ssh, line], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert [os.fsdecode(part) for part in process.stdout.split(b"\0")[:-1]] == ["first", *given_words]
