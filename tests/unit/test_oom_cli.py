"""The command ``oom``: terminal, JSON, HTML, Markdown; hostile text; exit statuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import snapshot_maker as maker
from golden_files import assert_golden

from fsdp_doctor.cli import main

FIXTURES = Path(__file__).parent.parent / "fixtures" / "logs"
INTERLEAVED = "megatron_interleaved.log"
FAILURE = {
    "kind", "fatal", "rank", "local_rank", "host", "pid", "device", "time", "iteration", "phase",
    "backend", "form", "requested_bytes", "total_bytes", "free_bytes", "allocated_bytes",
    "reserved_bytes", "reserved_unallocated_bytes", "process_bytes", "other_processes_bytes",
    "processes", "private_pool_bytes", "limit_bytes", "frames", "victim_of", "source",
}  # fmt: skip
HOSTILE = (
    "[rank1]: <script>alert(1)</script> \x1b[31mred\x1b]0;title\x07 [bold]rich[/bold] | `x`\n"
    '  File "/home/carol/<img src=x onerror=alert(2)>.py", line 3, in forward\n'
    "    x = [red]f(token='hf_abcdefghijklmnopqrstuvwx')\n"
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. <b>GPU 1</b> "
    "\x1b[2J has a total [link=http://x]capacity of 40.00 GiB http://user:pass@10.2.3.4/y "
    "/home/carol/secret/place.bin api_key=12345\n"
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A log with HTML, ANSI escapes, rich markup and secrets."""
    path = tmp_path / "a.log"
    path.write_text(HOSTILE, encoding="utf-8")
    return path


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run ``oom --json`` and return what it prints."""
    assert main(["oom", *args, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("name", "golden"),
    [
        (INTERLEAVED, "oom_megatron.txt"),
        ("ranks", "oom_ranks.txt"),
        ("slurm_host_oom.log", "oom_slurm.txt"),
    ],
)
def test_terminal_text(
    name: str, golden: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text at 80 columns is as recorded; the answer stands on the first screen."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(FIXTURES)
    assert main(["oom", name]) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "Do: " in "\n".join(printed.splitlines()[:20])
    assert_golden(golden, printed)


def test_json_contract(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Envelope, failures and findings have the keys of the contract."""
    monkeypatch.chdir(FIXTURES)
    answer = run_json(capsys, INTERLEAVED)
    assert (answer["schema"], answer["command"]) == (1, "oom")
    first = answer["failures"][answer["first_failure"]]
    assert set(first) >= FAILURE
    assert first["requested_bytes"] == 3 << 29
    assert first["source"] == {"file": INTERLEAVED, "line": 64}
    assert {"cause", "claim", "confidence", "severity", "level", "evidence", "flags", "advice"} <= (
        set(answer["findings"][0])
    )
    assert {f["victim_of"] for f in answer["failures"]} == {None, answer["first_failure"]}


def test_history_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Step times and memory of each rank are in the JSON, not known as null."""
    ranks = run_json(capsys, str(FIXTURES / "ranks"))["history"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert ranks[1]["memory"] == [[1, None, None, 52 << 30], [2, None, None, 77.5 * 2**30]]


def test_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``-`` reads standard input."""
    data = (FIXTURES / INTERLEAVED).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run_json(capsys, "-")["first_failure"] is not None


def test_hostile_text_in_the_terminal(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No escape reaches the terminal, and markup is shown as it stands."""
    assert main(["oom", str(hostile)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "[link=http://x]" in "".join(printed.split())
    assert "hf_abcdefghijklmnopqrstuvwx" not in printed


def test_hostile_text_in_html(hostile: Path, tmp_path: Path) -> None:
    """HTML in a log stays text; secrets, paths and addresses are not in the page."""
    page = tmp_path / "a.html"
    assert main(["oom", str(hostile), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<img" not in text
    assert "<b>GPU" not in text
    assert "&lt;b&gt;GPU 1" in text
    _nothing_private(text)


def test_markdown_for_an_issue_tracker(hostile: Path, tmp_path: Path) -> None:
    """Markdown has the answer, no active HTML, and nothing private."""
    page = tmp_path / "a.md"
    assert main(["oom", str(hostile), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Out of device memory: rank 1")
    assert "\\<b\\>GPU 1" in text
    _nothing_private(text)


def _nothing_private(text: str) -> None:
    for private in ("/home/carol", "10.2.3.4", "user:pass", "hf_abcdef", "12345"):
        assert private not in text, private


def test_hosts_are_replaced(tmp_path: Path) -> None:
    """A host's name is an alias in a report for others."""
    page = tmp_path / "a.md"
    assert main(["oom", str(FIXTURES / INTERLEAVED), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "gpu-node-17" not in text
    assert "host-1" in text
    assert "/home/alice" not in text


def test_html_has_plots(tmp_path: Path) -> None:
    """The history is drawn."""
    page = tmp_path / "a.html"
    assert main(["oom", str(FIXTURES / "ranks"), "-o", str(page)]) == 0
    assert page.read_text(encoding="utf-8").count("<svg") >= 1


@pytest.mark.parametrize("target", ["a.log", "."])
def test_empty_log(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty log is no job without failures: one line that names it, and status 2."""
    (tmp_path / "a.log").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert main(["oom", target]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{target}: the logs are empty" in shown.err


def test_empty_log_beside_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a snapshot of the failure an empty log is but a warning."""
    job = maker.training(1, oom=True)
    maker.write(job.snapshot(), tmp_path / "s.pickle")
    (tmp_path / "a.log").write_bytes(b"")
    answer = run_json(capsys, str(tmp_path / "a.log"), "--snapshot", str(tmp_path / "s.pickle"))
    assert answer["failures"][answer["first_failure"]]["form"] == "snapshot"
    assert "the logs are empty" in answer["warnings"]


@pytest.mark.parametrize(
    "args",
    [["missing.log"], [], ["."], ["picture.png"], ["a.log", "--config", "missing.yaml"],
     ["a.log", "--format", "csv"]],
    ids=" ".join,
)  # fmt: skip
def test_unusable_input(
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unusable input ends with status 2 and one clear line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    if "a.log" in args:
        (tmp_path / "a.log").write_text("x\n")
    assert main(["oom", *args]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.strip()
