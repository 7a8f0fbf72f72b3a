"""The emulated network: what its links let through, what is counted, and that nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch import Warm
from oktopk.cli import main
from oktopk.common.errors import UserError
from oktopk.lab.network import Counters, Link, Loopback, Network, namespaces, unavailable

needs_network = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
NAMES = Path("/run/netns")

TRANSFER = """
    import socket, sys, time
    megabytes = float(sys.argv[2])
    if sys.argv[1] == "send":
        connection = socket.create_connection(("host0", 5000))
        connection.sendall(bytes(int(megabytes * 1e6)))
        connection.recv(1)
    else:
        with socket.create_server(("", 5000)) as server:
            print("ready", flush=True)
            connection = server.accept()[0]
        buffer = bytearray(1 << 20)
        left, began = int(megabytes * 1e6) - connection.recv_into(buffer), time.monotonic()
        while left:
            left -= connection.recv_into(buffer)
        print(time.monotonic() - began, flush=True)
"""

ECHO = """
    import socket, sys, time
    if sys.argv[1] == "send":
        connection = socket.create_connection(("host0", 5000))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            connection.send(b"x")
            connection.recv(1)
            seconds.append(time.monotonic() - began)
        print(min(seconds))
    else:
        with socket.create_server(("", 5000)) as server:
            print("ready", flush=True)
            connection = server.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while byte := connection.recv(1):
            connection.send(byte)
"""

REDUCE = """
    import sys
    import torch, torch.distributed as dist
    import oktopk
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for algorithm in (oktopk.Dense(), oktopk.OkTopk(density=0.05)):
        reduce = oktopk.SparseAllreduce(algorithm, 1_000_000)
        gradients = [torch.randn(1_000_000) for _ in range(5)]
        reduce(gradients.pop())
        dist.barrier()
        print("ready", flush=True)
        sys.stdin.readline()
        sent = 0
        for gradient in gradients:
            reduce(gradient)
            sent += reduce.last.bytes_sent
        dist.barrier()
        print(sent, flush=True)
        sys.stdin.readline()
    dist.destroy_process_group()
"""


def python(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]


def talk(network: Network, script: str, *arguments: object) -> list[float]:
    """What hosts print at the end: host 0 listens, the others send."""
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    listener = network.start(0, python(script, "listen", *arguments), **pipe)
    assert listener.stdout
    assert listener.stdout.readline() == "ready\n"
    processes = [
        network.start(host, python(script, "send", *arguments), **pipe)
        for host in range(1, len(network.hosts))
    ]
    printed = [process.communicate(timeout=60)[0] for process in (listener, *processes)]
    return [float(number) for text in printed for number in text.split()]


def left(run: str) -> list[str]:
    """Namespaces and processes of a run that are there, still or already."""
    names = [name for name in os.listdir(NAMES) if name.startswith(run)] if NAMES.exists() else []
    found = [name for name in names if (NAMES / name).exists()]
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and run.encode() in (folder / "environ").read_bytes():
                found.append(f"process {folder.name}")
    if Path("/etc/netns").exists():
        found += [f"files {name}" for name in os.listdir("/etc/netns") if name.startswith(run)]
    return found


def gone(run: str) -> bool:
    """Has all of it gone, at last?"""
    for _ in range(150):
        if not left(run):
            return True
        time.sleep(0.1)
    return False


class Lab:
    """`oktopk lab` in a process of its own."""

    def __init__(self, warm: Warm, folder: Path, arguments: Sequence[str]) -> None:
        script = folder / "oktopk.py"
        script.write_text("import sys\nfrom oktopk.cli import main\nsys.exit(main())\n")
        out, err = folder / "out", folder / "err"
        self._warm = warm
        self.pid = warm.start(script, "lab", *arguments, folder=folder, out=out, err=err)
        self.code: int | None = None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        (self.code,) = self._warm.wait(self.pid, timeout=seconds)
        return self.code


Start = Callable[[Sequence[str]], Lab]


@pytest.fixture
def start(tmp_path: Path, warm: Warm) -> Iterator[Start]:
    """Starts `oktopk lab`, and ends it."""
    started: list[Lab] = []

    def start(arguments: Sequence[str]) -> Lab:
        started.append(Lab(warm, tmp_path, arguments))
        return started[-1]

    yield start
    for lab in started:
        if lab.code is None:
            with contextlib.suppress(ProcessLookupError):
                lab.signal(signal.SIGTERM)
            lab.wait(30)


def until(file: Path, text: str) -> None:
    for _ in range(600):
        if file.exists() and text in file.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{text} is not in {file.read_text()!r}")


# The network.


@needs_network
def test_links_limit_the_rate() -> None:
    """In one direction and, as a link is shaped anew, at another rate; and bytes are counted."""
    with Network(2, Link("100mbit")) as network:
        for rate, megabytes in ((100e6, 6.0), (1e9, 40.0)):
            before = network.counters()
            (seconds,) = talk(network, TRANSFER, megabytes)
            after = network.counters()
            assert 0.5 * rate < megabytes * 8e6 / seconds < 1.1 * rate
            sent = after[1].sent_bytes - before[1].sent_bytes
            assert megabytes * 1e6 < sent < 1.1 * megabytes * 1e6
            assert after[0].received_bytes - before[0].received_bytes == pytest.approx(
                sent, abs=1e4
            )
            assert after[0].sent_bytes - before[0].sent_bytes < 0.1 * sent
            assert after[1].sent_packets > before[1].sent_packets
            network.shape(Link("1gbit"))


@needs_network
def test_a_host_receives_no_faster_than_its_rate() -> None:
    """Two hosts that send to one at the same time share its link."""
    script = """
        import select, socket, sys, time
        count = 3_000_000
        if sys.argv[1] == "send":
            connection = socket.create_connection(("host0", 5000))
            connection.recv(1)
            connection.sendall(bytes(count))
        else:
            with socket.create_server(("", 5000)) as server:
                print("ready", flush=True)
                connections = [server.accept()[0] for _ in range(2)]
            for connection in connections:
                connection.send(b"x")
            left, began = 2 * count, time.monotonic()
            while left:
                left -= sum(len(one.recv(1 << 20)) for one in select.select(connections, [], [])[0])
            print(time.monotonic() - began)
    """
    with Network(3, Link("100mbit")) as network:
        (seconds,) = talk(network, script)
        assert 0.5 * 100e6 < 6 * 8e6 / seconds < 1.1 * 100e6


@needs_network
def test_delay() -> None:
    with Network(2, Link("1gbit", "10ms")) as network:
        (seconds,) = talk(network, ECHO)
        assert 0.02 <= seconds < 0.03
        network.shape(Link())
        (seconds,) = talk(network, ECHO)
        assert seconds < 0.005
        network.shape(Link(delay="3ms", loss=1))
        (seconds,) = talk(network, TRANSFER, 0.5)


@needs_network
def test_hosts_are_alone() -> None:
    """No way out, nothing that speaks by itself, and names that lead to the hosts."""
    with Network(2) as network:
        script = """
            import socket
            print(socket.gethostname(), socket.gethostbyname(socket.getfqdn()))
            print([name for _, name in socket.if_nameindex()])
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                print(other.connect_ex(("192.0.2.1", 9)) != 0)
        """
        process = network.start(1, python(script), stdout=subprocess.PIPE, text=True)
        printed = process.communicate(timeout=60)[0].splitlines()
        assert printed[0] == "host1 10.77.0.2"
        assert "eth0" in printed[1]
        assert printed[2] == "True"
        time.sleep(0.5)
        assert network.counters() == [Counters(0, 0, 0, 0)] * 2


@needs_network
def test_bytes_agree_with_our_own_count() -> None:
    """What `StepStats` says was sent, and what left the interfaces: their headers are the rest."""
    size = 3
    with Network(size) as network:
        address, port = network.meeting
        environ = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        processes = [
            network.start(
                rank,
                python(REDUCE),
                {**os.environ, **environ, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

        def told() -> list[str]:
            lines = [process.stdout.readline().strip() for process in processes if process.stdout]
            time.sleep(0.1)  # the last acknowledgements
            return lines

        def go_on() -> None:
            for process in processes:
                assert process.stdin
                process.stdin.write("\n")
                process.stdin.flush()

        for _ in ("dense", "sparse"):
            assert told() == ["ready"] * size
            before = network.counters()
            go_on()
            counted = [int(text) for text in told()]
            after = network.counters()
            sent = sum(b.sent_bytes - a.sent_bytes for a, b in zip(before, after, strict=True))
            packets = sum(
                b.sent_packets - a.sent_packets for a, b in zip(before, after, strict=True)
            )
            assert sum(counted) > 1e6
            # TCP's and Gloo's headers of a packet are about 100 bytes; and a packet may get lost.
            assert sum(counted) < sent < 1.02 * sum(counted) + 150 * packets
            assert sent < 1.15 * sum(counted)
            go_on()
        assert [process.wait(60) for process in processes] == [0] * size


# It goes away.


@needs_network
def test_closed_network_is_gone() -> None:
    """Also what a command has left running in the background, in a session of its own."""
    # A run that makes /etc/netns notes that down, and takes it away.
    there = Path("/etc/netns").exists()
    with Network(2) as network:
        process = network.start(0, ["sh", "-c", "setsid sleep 1000 & echo started"], stdout=-1)
        process.wait(30)
        # Three namespaces, files of two hosts, sleep, which may take a moment to appear.
        expected, until = 6 if there else 7, time.monotonic() + 30
        while len(left(network.run)) < expected and time.monotonic() < until:
            time.sleep(0.1)
        assert len(left(network.run)) == expected
    assert not left(network.run)
    with contextlib.suppress(ZeroDivisionError), Network(1) as network:
        1 / 0  # noqa: B018
    assert not left(network.run)


def run_of(process: Lab) -> str:
    (name,) = {name.rpartition("-")[0] for name in os.listdir(NAMES) if f"-{process.pid}-" in name}
    return name


@needs_network
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption(start: Start, tmp_path: Path, number: int, code: int) -> None:
    lab = start(["--hosts", "2", "--", "sh", "-c", "setsid sleep 1000 & echo started; wait"])
    until(tmp_path / "out", "[1] started")
    run = run_of(lab)
    lab.signal(number)
    assert lab.wait(60) == code
    assert not left(run)
    assert (tmp_path / "err").read_text() == "oktopk: interrupted\n"


@needs_network
@pytest.mark.parametrize("keeper", ["alive", "dead"])
def test_parent_is_killed(start: Start, tmp_path: Path, keeper: str) -> None:
    """The keeper cleans up; or else the next start does."""
    lab = start(["--delay", "1ms", "--", "sh", "-c", "setsid sleep 1000 & echo started; wait"])
    until(tmp_path / "out", "[1] started")
    run = run_of(lab)
    if keeper == "dead":
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if run.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
    lab.signal(signal.SIGKILL)
    assert lab.wait(30) == -signal.SIGKILL
    if keeper == "dead":
        time.sleep(0.3)
        assert left(run)
        with Network(1):
            assert not left(run)
    assert gone(run)


@needs_network
def test_a_living_owner_keeps_its_network() -> None:
    with Network(1) as one, Network(1):
        namespaces.remove_left_over()
        assert left(one.run)


@needs_network
def test_another_pid_namespace_keeps_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner's number means nothing here."""
    with Network(1) as one:
        space = namespaces._space()
        pid, _, after = one.run.partition(f"-{space}-")
        other = f"{pid.rpartition('-')[0]}-1-77-{after}"
        subprocess.run(["ip", "netns", "add", f"{other}-0"], check=True)
        try:
            namespaces.remove_left_over()
            assert left(other)
            monkeypatch.setattr(namespaces, "_space", lambda: "77")
            namespaces.remove_left_over()
            assert not left(other)
            assert left(one.run)
        finally:
            namespaces.remove(other)


def test_files_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folder stays if it was there before."""
    folder = tmp_path / "netns"
    monkeypatch.setattr(namespaces, "_FILES", folder)
    run = namespaces.new_run()
    for before in (False, True):
        if before:
            folder.mkdir()
        namespaces.write_hosts(f"{run}-0", "text")
        assert (folder / f"{run}-0" / "hosts").read_text() == "text"
        namespaces.remove(run)
        assert folder.exists() == before
        assert not before or not list(folder.iterdir())


@needs_network
def test_shaping_that_failed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with Network(2, Link("1gbit")) as network:
        with monkeypatch.context() as patch:
            patch.setattr(network, "_ports", ["port0", "nowhere"])
            with pytest.raises(UserError, match="nowhere"):
                network.shape(Link("100mbit", "1ms"))
        assert network.link == Link()
        network.shape(Link("100mbit", "1ms"))
        assert network.link == Link("100mbit", "1ms")
        (seconds,) = talk(network, ECHO)
        assert seconds >= 0.002


# The command.


@needs_network
def test_ranks_know_their_place(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
        import os, sys
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES",
                 "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
        print(*(os.environ[name] for name in names), *sys.argv[1:])
    """
    command = [*python(script), "{rank}/{size}", "{host}", "{address}:{port}", "{else}"]
    assert main(["lab", "--ranks-per-host", "2", "--", *command]) == 0
    out, err = capfd.readouterr()
    place = "10.77.0.1 29500 eth0 {}/4 {} 10.77.0.1:29500 {{else}}"
    assert sorted(out.splitlines()) == sorted(
        [
            f"0 4 0 2 0 2 {place.format(0, 0)}",
            f"[1] 1 4 1 2 0 2 {place.format(1, 0)}",
            f"[2] 2 4 0 2 1 2 {place.format(2, 1)}",
            f"[3] 3 4 1 2 1 2 {place.format(3, 1)}",
        ]
    )
    table = err.splitlines()
    assert table[0].split() == ["host", "address", "sent", "received", "seconds"]
    assert [line.split()[:2] for line in table[1:]] == [["0", "10.77.0.1"], ["1", "10.77.0.2"]]


@needs_network
def test_one_fails(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the others end, too, and its exit code is ours."""
    monkeypatch.setattr("oktopk.lab.network.command._SECONDS_ALONE", 0.2)
    began = time.monotonic()
    assert main(["lab", "--", "sh", "-c", "if [ {rank} = 1 ]; then exit 7; fi; sleep 1000"]) == 7
    assert time.monotonic() - began < 60
    assert "oktopk: rank 1 failed, exit code 7" in capfd.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_loopback(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["sh", "-c", "echo {rank} $RANK {address} $MASTER_ADDR; setsid sleep 1000 & exit 0"]
    assert main(["lab", "--loopback", "--", *command]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["0 0 127.0.0.1 127.0.0.1", "[1] 1 1 127.0.0.1 127.0.0.1"]
    assert err == ""
    with Loopback(2) as hosts:
        assert hosts.counters() == []
        process = hosts.start(1, ["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    assert process.returncode == -signal.SIGKILL
    assert not left(hosts.run)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "write it after --"),
        ("--hosts 2 true", "after --"),
        ("--rate 1foo -- true", "'1foo' is no rate: write 1gbit"),
        ("--rate 0gbit -- true", "8kbit or more"),
        ("--delay 3 -- true", "'3' is no delay: write 0.2ms"),
        ("--delay 2min -- true", "write 0.2ms"),
        ("--loss 200 -- true", "take 0 or more, below 100"),
        ("--loss nan -- true", "take 0 or more, below 100"),
        ("--loopback --rate 1gbit -- true", "leave out either --rate or --loopback"),
        ("--loopback --delay 1ms -- true", "leave out either --delay or --loopback"),
        ("--loopback --hosts 0 -- true", "take 1 to 254"),
        ("--loopback --hosts two -- true", "--hosts"),
        ("--loopback --loss inf -- true", "take 0 or more, below 100"),
        ("--ranks-per-host 0 -- true", "take 1 to 256"),
        ("--loopback --ranks-per-host 1000000 -- true", "take 1 to 256"),
        ("-- no-such-command", "'no-such-command' is not a command that can be run"),
    ],
)
def test_mistakes(arguments: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *arguments.split()]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x7fELF and nothing", "Exec format error"),
        (b"#!/nowhere/python\n", "No such file or directory"),
    ],
)
def test_a_command_that_is_no_program(
    content: bytes, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "command"
    command.write_bytes(content)
    command.chmod(0o755)
    assert main(["lab", "--loopback", "--", str(command)]) == 2
    assert capfd.readouterr().err == f"oktopk: error: {command} cannot be started: {says}\n"


@pytest.mark.parametrize(
    ("missing", "says"), [("tc", "apt install iproute2"), ("root", "needs root")]
)
def test_says_what_is_missing(
    missing: str, says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that there is the loopback."""
    if not sys.platform.startswith("linux"):
        says = "needs Linux"
    monkeypatch.setattr("os.geteuid", lambda: 1000 if missing == "root" else 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name == missing else f"/bin/{name}")
    unavailable.cache_clear()
    try:
        assert main(["lab", "--", "true"]) == 2
    finally:
        unavailable.cache_clear()
    err = capfd.readouterr().err
    assert says in err
    assert "--loopback" in err


@pytest.mark.parametrize(
    ("rate", "bits"), [("1gbit", 1e9), ("2.5GBit", 2.5e9), ("12.5mbps", 100e6), ("1kibit", 1024.0)]
)
def test_rates(rate: str, bits: float) -> None:
    if bits < 8000:
        with pytest.raises(UserError, match="8kbit or more"):
            Link(rate)
    else:
        assert Link(rate).bits == bits


# All together.


@needs_network
def test_torchrun_trains_across_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As it would across machines."""
    pytest.importorskip("rich")
    pytest.importorskip("jiwer")
    soundfile = pytest.importorskip("soundfile")
    from oktopk.workloads.speech import manifest
    from oktopk.workloads.speech.manifest import Utterance

    recording = tmp_path / "yes.wav"
    soundfile.write(recording, [0.1, -0.1] * 4000, 16_000)
    manifest.write(tmp_path / "list.csv", [Utterance(recording, "YES", 0.5)] * 4)
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "{address}:{port}"),
    ]
    train = [
        *("-m", "oktopk", "train", "--dataset", "manifest", "--train-manifest", "list.csv"),
        *("--val-manifest", "list.csv", "--width", "16", "--depth", "1", "--max-steps", "3"),
        *("--warmup-steps", "1", "--batch-size", "1", "--examples", "1", "--no-tensorboard"),
        *("--threads", "1", "--run-dir", "run"),
    ]
    monkeypatch.chdir(tmp_path)
    code = main(["lab", "--rate", "1gbit", "--delay", "0.2ms", "--", *torchrun, *train])
    shown, errors = capfd.readouterr()
    assert code == 0, errors
    assert shown.count("2 workers on cpu") == 1
    assert "results are in run" in shown
    table = errors.splitlines()[-2:]
    assert [row.split()[1] for row in table] == ["10.77.0.1", "10.77.0.2"]
    assert not any("0 B" in row for row in table)
