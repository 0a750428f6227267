"""Rules about what a memory snapshot shows: what fills the device, free pieces, growth.

Names are those of ``snapshot_facts``. A share of memory is no proof of guilt, so the weight of
"this filled it" grows with the share, and shrinks with what nobody can name.
"""

from __future__ import annotations

from fsdp_doctor.postmortem.rule import Rule


def _seen(
    cause: str,
    when: str,
    weight: float,
    because: str,
    size: str | None = None,
    *,
    times: str | None = None,
) -> Rule:
    return Rule(cause, when, weight, because, size, times, source="snapshot")


def _fills(cause: str, group: str, name: str) -> Rule:
    return _seen(
        cause,
        f"share_{group} >= 0.1 and (unset(kind) or pool_kind)",
        0.85,
        f"{name} hold {{held_{group}}} of {{held}}",
        f"held_{group}",
        times=f"part_{group}",
    )


def _leads(cause: str, group: str) -> Rule:
    return _seen(
        cause,
        f"leading == '{group}' and share_{group} >= 0.2 and (unset(kind) or pool_kind)",
        0.25,
        "nothing else holds as much",
    )


RULES: tuple[Rule, ...] = (
    _fills("state-does-not-fit", "state", "parameters, gradients and optimizer state"),
    _fills("activations", "activations", "activations"),
    _fills("logits", "logits", "logits and what the loss makes of them"),
    _fills("communication-buffers", "gathered", "gathered parameters and communication buffers"),
    _fills("gradient-sync", "whole_gradients", "gradients that are not sharded"),
    _fills("unsharded-copy", "copies", "copies of the model (deepcopy, EMA, reference)"),
    _leads("state-does-not-fit", "state"),
    _leads("activations", "activations"),
    _leads("logits", "logits"),
    _leads("communication-buffers", "gathered"),
    _leads("gradient-sync", "whole_gradients"),
    _seen(
        "gradient-sync",
        "share_whole_gradients >= 0.1 and whole_gradient_blocks >= 3",
        0.4,
        "of {whole_gradient_blocks} blocks at once: several units",
    ),
    _seen(
        "wrap-granularity",
        "units == 1 and (share_gathered >= 0.2 or (collective_words and"
        " request_over_allocated >= 0.15))",
        0.9,
        "the whole model is one FSDP unit",
    ),
    _seen(
        "wrap-granularity",
        "units >= 2 and largest_unit_share >= 0.25",
        0.5,
        "the largest unit takes {largest_unit} when gathered",
        "largest_unit",
    ),
    _seen(
        "optimizer-temporaries",
        "phase == 'optimizer' and share_temporaries >= 0.03",
        0.4,
        "temporaries hold {held_temporaries} in the optimizer step",
        "held_temporaries",
    ),
    _seen(
        "optimizer-temporaries",
        "phase == 'optimizer' and share_temporaries >= 0.15",
        0.5,
        "that is much for a step",
    ),
    _seen(
        "leak",
        "kept_per_step > 0 and kept_steps >= 4",
        0.9,
        "{kept_per_step} more stay at every step: {kept_first} when step {kept_first_step} begins, "
        "{kept_last} when step {kept_last_step} does",
        "kept",
    ),
    _seen(
        "leak",
        "kept_per_step > 0 and kept_steps == 3",
        0.75,
        "{kept_per_step} that step {kept_first_step} made are there when step {kept_last_step} "
        "begins",
        "kept",
    ),
    _seen(
        "evaluation-accumulation",
        "phase == 'evaluation' and repeated_blocks >= 4",
        0.5,
        "{repeated_blocks} blocks of the same code are kept: {repeated}",
        "repeated",
    ),
    _seen(
        "evaluation-accumulation",
        "outputs_share >= 0.2",
        0.8,
        "{outputs_passes} forwards without a backward left {outputs_blocks} blocks of one piece of "
        "code behind: {outputs}",
        "outputs",
    ),
    _seen(
        "activations",
        "outputs_share >= 0.2 and phase != 'evaluation'",
        -0.6,
        "but forwards without a backward left nothing but outputs behind",
    ),
    _seen(
        "logits",
        "outputs_share >= 0.2 and phase != 'evaluation'",
        -0.6,
        "but it is outputs of several forwards that are kept",
    ),
    _seen(
        "checkpoint-copies",
        "state_copies_share >= 0.03 and state_copies_refused",
        0.75,
        "{state_copies_blocks} blocks as large as those of the state were made outside of a step, "
        "{state_copies} in all, and one more was asked for",
        "state_copies",
    ),
    _seen(
        "state-does-not-fit",
        "state_copies_share >= 0.03 and state_copies_refused",
        -0.3,
        "but copies of it were being made",
    ),
    _seen(
        "activations",
        "phase == 'evaluation'",
        -0.6,
        "but an evaluation keeps nothing for a backward",
    ),
    _seen("logits", "phase == 'evaluation'", -0.5, "but an evaluation keeps outputs of batches"),
    _seen(
        "activations",
        "phase == 'checkpoint_save' or phase == 'optimizer'",
        -0.3,
        "but the request came after backward",
    ),
    _seen(
        "fragmentation",
        "space == 'fragmented' and pieces_share >= 0.03",
        0.85,
        "{pieces} are free where the request may go, the largest piece is {largest_piece}",
        "pieces",
        times="pieces_part",
    ),
    _seen(
        "fragmentation",
        "space == 'fragmented' and pieces_share < 0.03",
        0.15,
        "{pieces} are free in pieces, no more than the usual waste",
        "pieces",
    ),
    _seen(
        "fragmentation",
        "space == 'combined' and pieces_share >= 0.03",
        0.6,
        "{pieces} free in pieces and what the device has left would do together",
        "pieces",
        times="pieces_part",
    ),
    _seen(
        "fragmentation",
        "space == 'limit' and pieces_share >= 0.03 and set(limit) and"
        " pieces + limit - reserved >= requested",
        0.55,
        "{pieces} free in pieces and what is left below the limit would do together",
        "pieces",
        times="pieces_part",
    ),
    _seen(
        "fragmentation",
        "not refused and pinned_free >= 268435456 and pinned_share >= 0.1",
        0.5,
        "{pinned_free} are reserved and free, but held by the blocks beside them",
        "pinned_free",
    ),
    _seen(
        "fragmentation",
        "replay_expandable == 'fits' and replay_margin_share >= 0.02 and pieces_share >= 0.03",
        0.4,
        "replayed with expandable segments the request is served, with {replay_margin} to spare",
        "replay_margin",
    ),
    _seen(
        "fragmentation",
        "replay_expandable == 'fails' and refused and not expandable",
        -0.5,
        "but replayed with expandable segments {replay_margin} are missing as well",
    ),
    _seen(
        "fragmentation",
        "kept_per_step > 0",
        -0.4,
        "but memory grows with every step, which fills any layout",
    ),
    _seen(
        "stream-reuse",
        "elsewhere_whose == 'stream' and elsewhere_share >= 0.03",
        0.7,
        "a free piece of {elsewhere} of another stream would have held the request",
        "elsewhere",
    ),
    _seen(
        "stream-reuse",
        "held_waiting >= requested and share_waiting >= 0.03",
        0.55,
        "{held_waiting} were freed but still in use on another stream",
        "held_waiting",
    ),
    _seen(
        "stream-reuse",
        "share_waiting >= 0.1",
        0.6,
        "that is a large part of the memory",
        times="share_waiting",
    ),
    _seen(
        "cuda-graph-pools",
        "elsewhere_whose == 'pool' and elsewhere_share >= 0.03",
        0.7,
        "a free piece of {elsewhere} of a private pool would have held the request",
        "elsewhere",
    ),
    _seen(
        "cuda-graph-pools",
        "private_reserved_share >= 0.1 and unset(private_share)",
        0.4,
        "private pools keep {private_reserved} reserved",
        "private_reserved",
    ),
    _seen(
        "library-allocation",
        "kind in ['library_alloc', 'nccl_alloc', 'driver_oom'] and refused == false",
        0.35,
        "PyTorch's own allocator refused nothing: memory was wanting outside of its pool",
    ),
    _seen(
        "memory-limit",
        "refused and device_free >= requested",
        0.3,
        "{device_free} were free on the device when {requested} were refused",
        "device_free",
    ),
)
