"""What is passed on holds no secrets, paths, hosts, addresses or users."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_oom_diagnosis import message

from fsdp_doctor.cli import main
from fsdp_doctor.report.private_text import without_names, without_secrets

SECRETS = [
    "hf_abcdefghijklmnopqrstuv", "sk-proj-abcdefghij0123456789", "ghp_abcdefghijklmnopqrst1234",
    "github_pat_11ABCDEFG0abcdefghijklmnop", "glpat-abcdefghij0123456789", "AKIAIOSFODNN7EXAMPLE",
    "xoxb-1234567890-abcdef", "nvapi-abcdefghij0123456789abcdef", "pypi-AgEIcHlwaS5vcmcCJDExYzQ",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.s5cret",
    "0123456789abcdef0123456789abcdef01234567",
]  # fmt: skip
ASSIGNED = [
    "api_key=s3cr3tvalue", "API-KEY: s3cr3tvalue", '"password": "s3cr3tvalue"',
    "'hf_token': 's3cr3tvalue'", "--token s3cr3tvalue", "--wandb-api-key=s3cr3tvalue",
    "export AWS_SECRET_ACCESS_KEY=s3cr3tvalue", "db_passwd = s3cr3tvalue", "PGPWD=s3cr3tvalue",
    "Authorization: Bearer s3cr3tvalue123", "https://carl:s3cr3tvalue@git.corp/x",
    "https://blob.core/x?sv=1&sig=s3cr3tvalue", "AccountKey=s3cr3tvalue==;Endpoint",
    "Set-Cookie: s3cr3tvalue", "-----BEGIN RSA PRIVATE KEY----- s3cr3tvalue",
]  # fmt: skip
NAMES = [
    "/home/carol/proj/train.py", "~/proj/carol/train.py", "~carol/x/train.py", "../carol/x.bin",
    r"C:\Users\carol\train.py", r"\\carol\share\data.bin", "s3://carol/data/x.tar",
    "hdfs:///user/carol/x", "file:///home/carol/x", "carol@example.org", "user=carol",
    "/mnt/carol/fs/ckpt/step_10/", "--data-path=/data/carol/x", "carol-node-17",
    "gpu.carol.internal", "https://git.corp/carol/x", "carol.cluster.local",
    "/lustre/fsw/carol/run:1/log.txt", '"/scratch/carol/a"',
]  # fmt: skip
ADDRESSES = [
    "10.2.3.4", "10.2.3.4:29500", "[fe80::1ff:fe23:4567:890a]:29500", "2001:db8::8a2e:370:7334",
    "::ffff:10.2.3.4", "ip-10-2-3-4", "dgx-a100-04", "nid001234", "hgx07", "gpu-node-17",
    "worker-12-abcde", "node017.hpc.example.com",
]  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
def test_tokens_are_known_by_their_form(secret: str) -> None:
    """A token is taken out wherever it stands."""
    assert secret not in without_secrets(f"failed with {secret}, retrying")


@pytest.mark.parametrize("text", ASSIGNED)
def test_values_are_known_by_their_name(text: str) -> None:
    """What is assigned to a secret's name is taken out, the name stays."""
    assert "s3cr3tvalue" not in without_secrets(text)


@pytest.mark.parametrize("text", NAMES)
def test_paths_and_people(text: str) -> None:
    """Folders and people are taken out."""
    assert "carol" not in without_names(f"x {text} y")


@pytest.mark.parametrize("text", ADDRESSES)
def test_hosts_and_addresses(text: str) -> None:
    """Hosts and addresses are taken out."""
    cleaned = without_names(f"x {text} y")
    assert text not in cleaned
    assert not any(part in cleaned for part in ("10.2.3.4", "fe80", "2001", "10-2-3-4", "example"))


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
        "num_nodes=4 node_rank 0 worker 3 nproc_per_node: 8 layers.31.mlp.down_proj",
        "2026-08-22 10:00:00.123456 [rank3] 16:23:59 max_tokens=4096 tokens: 8192 num_workers 4",
        "torch/nn/modules/module.py:1790 in _call_impl",
        "see https://docs.pytorch.org/docs and the token was refused",
        "aten::mul at::_ops::add::call c10::cuda::CUDACachingAllocator::malloc",
        "activations hold 6.20 GiB of 22.25 GiB (0x7f00:1)",
    ],
)
def test_the_rest_stays(text: str) -> None:
    """Numbers, frames, ranks and steps stay as they are."""
    assert without_names(without_secrets(text)) == text


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_reports_for_others_hold_none(suffix: str, tmp_path: Path) -> None:
    """A report made of a log full of them holds none, in its frames, message and config too."""
    log = tmp_path / "carol-node-17" / "rank0.log"
    log.parent.mkdir()
    lines = [
        "Traceback (most recent call last):",
        *(f'  File "/home/carol/{i}/t.py", line {i}, in forward\n    f("{text}")'
          for i, text in enumerate([*ASSIGNED, *SECRETS, *NAMES, *ADDRESSES])),
        f"{message()} {' '.join([*NAMES, *ADDRESSES])}",
    ]  # fmt: skip
    log.write_text("\n".join(lines) + "\n")
    config = tmp_path / "c.txt"
    config.write_text("micro_batch_size: 4\nwandb_api_key: s3cr3tvalue\nsequence_length: 10\n")
    page = tmp_path / f"a.{suffix}"
    assert main(["oom", str(log), "--config", str(config), "-o", str(page)]) == 0
    text = page.read_text()
    for private in ("carol", "s3cr3tvalue", "10.2.3.4", "node-17", *SECRETS, str(tmp_path)):
        assert private not in text, private


@given(st.text(alphabet="ab1.:/\\-_=@ ~\"'&?[]", max_size=2000))
@settings(max_examples=60, deadline=None)
def test_no_text_is_too_much(text: str) -> None:
    """Any text is cleaned without an error, and cleaning twice changes nothing that matters."""
    once = without_names(without_secrets(text))
    assert isinstance(without_names(without_secrets(once)), str)
