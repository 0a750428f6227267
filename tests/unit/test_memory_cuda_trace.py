"""Reading CUDA allocator history: hand-made snapshots, and real ones where they are at hand."""
# ruff: noqa: D102, D103 - the names say it

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_doctor.memory import Label, build_anatomy
from fsdp_doctor.memory.cuda_phases import infer_marks
from fsdp_doctor.memory.cuda_trace import (
    Backward,
    Begin,
    End,
    Enter,
    Holds,
    Leave,
    Mark,
    hint_autocast_casts,
    read_history,
    round_up,
)
from fsdp_doctor.memory.timeline import level_curve
from fsdp_doctor.model.memory import Category, Phase

REAL = Path(__file__).parents[2].parent / "shared" / "snapshots"


class Device:
    """Plays the caching allocator: a trace with a clock, and the count of operations."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.live: dict[int, int] = {}
        self.operations = 0
        self.clock = 1_700_000_000_000_000
        self.marks: list[Mark] = []
        self.peak = self.requested = 0

    def alloc(self, size: int, frames: tuple[tuple[str, str], ...] = ()) -> int:
        address = 4096 + 512 * len(self.trace)
        listed = [{"filename": f, "line": 1, "name": n} for f, n in frames]
        self._add("alloc", address, size, listed)
        self.live[address] = size
        self.operations += 1
        self.requested += size
        self.peak = max(self.peak, self.requested)
        return address

    def free(self, address: int) -> None:
        size = self.live.pop(address)
        self._add("free_requested", address, size, [])
        self._add("free_completed", address, size, [])
        self.operations += 1
        self.requested -= size

    def _add(self, action: str, address: int, size: int, frames: list[Any]) -> None:
        self.clock += 10
        entry = {"action": action, "addr": address, "size": size, "stream": 0}
        self.trace.append(entry | {"time_us": self.clock, "frames": frames})

    def mark(self, note: Any) -> None:
        if isinstance(note, Begin):
            self.peak = self.requested
        self.clock += 1
        self.marks.append(Mark(self.clock, note, self.operations))

    def snapshot(self) -> dict[str, Any]:
        blocks = [
            {"address": a, "size": round_up(s), "requested_size": s, "state": "active_allocated"}
            for a, s in sorted(self.live.items())
        ]
        segments = [{"device": 0, "address": 0, "blocks": blocks}]
        return {"segments": segments, "device_traces": [self.trace]}

    def read(self, **options: Any) -> Any:
        return read_history(
            self.snapshot(), 0, self.marks, operations_at_end=self.operations, **options
        )


def one_step(device: Device) -> None:
    """Parameters, one step of a two-layer model, gradients, optimizer state."""
    device.mark(Begin(-1, Phase.INIT))
    weight = device.alloc(1000)
    device.mark(Holds(weight, Label(Category.PARAMETERS, None, "layer")))
    device.mark(End())
    device.mark(Begin(0, Phase.FORWARD))
    device.mark(Enter(""))
    device.mark(Enter("layer"))
    scratch = device.alloc(100)
    kept = device.alloc(5000)
    device.free(scratch)
    device.mark(Leave("layer"))
    device.mark(Enter("head"))
    logits = device.alloc(9000)
    device.mark(Leave("head"))
    device.mark(Leave(""))
    loss = device.alloc(4)
    device.mark(End(device.peak))
    device.mark(Begin(0, Phase.BACKWARD))
    logits_gradient = device.alloc(9000)
    device.mark(Backward("head"))
    temporary = device.alloc(700)
    gradient = device.alloc(1000)
    for address in (logits, logits_gradient, temporary, kept, loss):
        device.free(address)
    device.mark(Holds(gradient, Label(Category.GRADIENTS)))
    device.mark(End(device.peak))
    device.mark(Begin(0, Phase.OPTIMIZER))
    state = device.alloc(2000)
    device.mark(Holds(state, Label(Category.OPTIMIZER_STATE)))
    device.free(gradient)
    device.mark(End(device.peak))


@pytest.mark.parametrize("counted", [True, False])
def test_one_step_by_count_and_by_clock(counted: bool) -> None:
    device = Device()
    one_step(device)
    if not counted:
        device.marks = [mark._replace(operations=None) for mark in device.marks]
    history = device.read(expected_operations=device.operations)
    assert history.incomplete == []
    anatomy = build_anatomy(history.log, 0, source="cuda_history")
    assert anatomy.phases["forward"].categories == {
        "logits": 9216 + 512,
        "activations": 5120,
        "parameters": 1024,
    }
    assert anatomy.peak_phase is Phase.BACKWARD
    assert anatomy.categories == {
        "logits": 2 * 9216 + 512,
        "activations": 5120,
        "parameters": 1024,
        "gradients": 1024,
        "temporaries": 1024,
    }
    assert anatomy.resident == {"optimizer_state": 2048, "parameters": 1024}
    gradients = [t for t in anatomy.top_allocations if t.subcategory == "gradient"]
    assert [(t.bytes, t.category) for t in gradients] == [(9216, Category.LOGITS)]


def test_counts_hold_when_the_clock_is_a_little_off() -> None:
    device = Device()
    one_step(device)
    exact = build_anatomy(device.read().log, 0, source="cuda_history")
    device.marks = [mark._replace(time_us=mark.time_us + 900) for mark in device.marks]
    assert build_anatomy(device.read().log, 0, source="cuda_history") == exact


def test_a_wrong_count_falls_back_to_the_clock() -> None:
    device = Device()
    one_step(device)
    exact = build_anatomy(device.read().log, 0, source="cuda_history")
    for entry in device.trace:
        entry["time_us"] = device.marks[0].time_us + 100_000 * (
            entry["time_us"] - device.marks[0].time_us
        )
    base = device.marks[0].time_us
    device.marks = [
        Mark(base + 100_000 * (m.time_us - base), m.note, (m.operations or 0) + 3)
        for m in device.marks
    ]
    assert build_anatomy(device.read().log, 0, source="cuda_history") == exact


def test_requested_peak_is_checked() -> None:
    device = Device()
    device.mark(Begin(0, Phase.FORWARD))
    device.alloc(1000)
    device.mark(End(1001))
    assert device.read().incomplete == [
        "step 0 forward: the device counted a peak of 1001 requested bytes, the history has 1000"
    ]


def test_overflow_is_named_and_old_blocks_are_adopted() -> None:
    device = Device()
    old = device.alloc(3000)
    ghost = device.alloc(100)
    del device.trace[:]
    device.mark(Begin(0, Phase.FORWARD))
    device.free(old)
    device.alloc(50)
    device.mark(End())
    history = device.read(expected_operations=device.operations)
    assert history.incomplete == ["the allocator's history lost 2 of its oldest events"]
    assert level_curve(history.log)[2] == 3072 + 512
    anatomy = build_anatomy(history.log, 0, source="cuda_history")
    assert anatomy.phases["forward"].peak_allocated_bytes == 3072 + 512
    assert anatomy.phases["forward"].end_allocated_bytes == 512 + 512
    assert anatomy.categories == {"unknown": 3584}
    assert ghost in device.live


def test_a_lost_free_does_not_double() -> None:
    device = Device()
    device.mark(Begin(0, Phase.FORWARD))
    address = device.alloc(1000)
    device.trace.append(device.trace[-1] | {"size": 200})
    device.live[address] = 200
    device.mark(End())
    assert device.read().log.current_bytes == 512


def test_oom_entry() -> None:
    device = Device()
    device.mark(Begin(0, Phase.FORWARD))
    device.alloc(1000)
    device.trace.append({"action": "oom", "size": 1 << 30, "device_free": 77, "stream": 0})
    history = device.read()
    assert (history.failed_bytes, history.device_free_bytes) == (1 << 30, 77)


def test_unknown_actions_and_other_devices_are_ignored() -> None:
    device = Device()
    device.mark(Begin(0, Phase.FORWARD))
    device.alloc(1000)
    snapshot = device.snapshot()
    snapshot["device_traces"][0].append({"action": "annotate", "addr": 0, "size": 0})
    snapshot["segments"].append(snapshot["segments"][0] | {"device": 1, "address": 999})
    assert read_history(snapshot, 0, device.marks).log.current_bytes == 1024
    assert read_history(snapshot, 1, []).log.current_bytes == 1024
    assert read_history({}, 0, []).log.position == 0


def test_engines_are_told_by_their_frames() -> None:
    fsdp2 = "site-packages/torch/distributed/fsdp/_fully_shard/"
    megatron = "site-packages/megatron/core/distributed/fsdp/src/megatron_fsdp/"
    buffer = megatron + "param_and_grad_buffer.py"
    call = ("site-packages/torch/nn/modules/module.py", "_call_impl")
    cases = {
        ((fsdp2 + "_fsdp_param.py", "alloc_storage"),
         (fsdp2 + "_fsdp_param.py", "alloc_all_gather_outputs")): "unsharded_parameters",
        ((fsdp2 + "_fsdp_collectives.py", "allocate"),
         (fsdp2 + "_fsdp_collectives.py", "foreach_all_gather")): "communication",
        (("train.py", "forward"), call,
         ("site-packages/torch/nn/parallel/distributed.py", "_pre_forward")): "activations",
        (("site-packages/torch/nn/parallel/distributed.py", "_pre_forward"), call):
            "communication",
        (("site-packages/torch/nn/functional.py", "cross_entropy"),): "logits",
        (("site-packages/torch/distributed/fsdp/_flat_param.py",
          "_alloc_padded_unsharded_flat_param"),): "unsharded_parameters",
        ((buffer, "fetch_bucket"), (buffer, "async_bucket_gather")): "unsharded_parameters",
        ((buffer, "fetch_bucket"), (buffer, "main_grad_getter")): "unsharded_gradients",
        (("site-packages/megatron_fsdp/param_and_grad_buffer.py",
          "_bucket_group_gradient_reduce"),): "communication",
    }  # fmt: skip
    for frames, category in cases.items():
        device = Device()
        device.mark(Begin(0, Phase.FORWARD))
        device.alloc(1000, frames)
        device.mark(End())
        anatomy = build_anatomy(device.read().log, 0, source="cuda_history")
        assert anatomy.categories == {category: 1024}, frames


def test_autocast_casts_are_told_by_size_and_order() -> None:
    device = Device()
    device.mark(Begin(0, Phase.FORWARD))
    device.mark(Enter("layer"))
    for size in (2000, 2000, 2000):  # input, weight, output of the same size
        device.alloc(size)
    device.mark(Leave("layer"))
    device.mark(End())
    log = device.read().log
    hint_autocast_casts(log, {"layer": (1000,)})
    assert [a.hint is not None for a in log.allocations] == [False, True, False]


def test_cublas_workspace_outlives_its_step() -> None:
    device = Device()
    for step in range(2):
        device.mark(Begin(step, Phase.FORWARD))
        device.alloc(33_554_432 if step == 0 else 100)
        device.mark(End())
    anatomy = build_anatomy(device.read().log, 1, source="cuda_history")
    assert anatomy.categories == {"temporaries": 33_554_432, "activations": 512}
    assert anatomy.top_allocations[0].subcategory == "cublas_workspace"


@given(st.lists(st.one_of(st.integers(1, 10**9), st.integers(-40, -1)), max_size=80))
def test_the_log_is_the_trace(actions: list[int]) -> None:
    device = Device()
    device.mark(Begin(0, Phase.FORWARD))
    levels = [0]
    for action in actions:
        if action > 0:
            device.alloc(action)
        elif device.live:
            device.free(list(device.live)[-action % len(device.live)])
        else:
            continue
        levels.append(sum(round_up(size) for size in device.live.values()))
    device.mark(End(device.peak))
    history = device.read(expected_operations=device.operations)
    assert history.incomplete == []
    assert level_curve(history.log) == levels
    anatomy = build_anatomy(history.log, 0, source="cuda_history")
    assert anatomy.peak_allocated_bytes == max(levels)
    assert sum(anatomy.categories.values()) == max(levels)


class _Plain(pickle.Unpickler):
    """Reads nothing but containers and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


@pytest.mark.parametrize(
    ("name", "phase", "measured"),
    [
        # peaks of the device's own counters in a run of the same shape, one rank of two on an H200
        ("ddp", "backward", None),
        ("fsdp2", "backward", 12_764_263_424),
    ],
)
def test_real_snapshots(name: str, phase: str, measured: int | None) -> None:
    path = REAL / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"recorded snapshots are not at hand ({path})")
    with path.open("rb") as file:
        snapshot = _Plain(file).load()
    history = read_history(snapshot, 0, infer_marks(snapshot, 0))
    assert history.incomplete == []
    anatomy = build_anatomy(
        history.log,
        2,
        source="cuda_history",
        measured_peak_bytes={phase: measured} if measured else None,
    )
    assert anatomy.incomplete is None
    assert list(anatomy.phases) == ["wrap", "forward", "backward", "optimizer"]
    for part in anatomy.phases.values():
        total = part.peak_allocated_bytes
        assert sum(part.categories.values()) == total
        assert part.categories.get("unknown", 0) < 0.02 * total or part is anatomy.phases["wrap"]
    assert anatomy.categories.get("rounding", 0) < 0.001 * anatomy.peak_allocated_bytes
    parameters = 953_223_168 * 4
    share = parameters if name == "ddp" else parameters // 2
    in_optimizer = anatomy.phases["optimizer"].categories
    assert abs(in_optimizer["parameters"] - share) < 0.01 * share
    assert abs(in_optimizer["gradients"] - share) < 0.01 * share
    assert abs(in_optimizer["optimizer_state"] - 2 * share) < 0.01 * share
