"""Rules of the diagnosis: a condition over the evidence, a cause, a weight, what it rests on.

Conditions are in the language of ``config.rules.expression``; names are those of ``facts``.
``weight`` is the confidence if nothing else speaks for or against; rules for one cause add up as
independent evidence does, a negative weight takes from it.

Weights are judgement: above 0.7 the evidence names the mechanism (a frame, a counter, a message),
0.4 to 0.7 it fits this cause better than the others, below 0.4 it is one candidate of several.
"""

from __future__ import annotations

from fsdp_doctor.postmortem import rules_device, rules_host, rules_snapshot
from fsdp_doctor.postmortem.rule import Rule

DEFINITIONS: dict[str, str] = {
    "device_kind": "kind in ['device_oom', 'driver_oom', 'cut']",
    "pool_kind": "kind in ['device_oom', 'cut']",
    "computing": "phase in ['forward', 'backward']",
    "early": "moment in ['first_step', 'before_training']",
    "full": "allocated_share >= 0.85",
    "offloads": "mentions(switched_on, 'offload') or mentions(around, 'offload')",
    "fp8": "mentions(switched_on, 'fp8') or mentions(switched_on, 'float8')"
    " or mentions(frames, 'fp8')"
    " or mentions(frames, 'float8')",
    "quantized": "mentions(config, 'load_in_4bit=true') or mentions(config, 'load_in_8bit=true')"
    " or mentions(switched_on, 'lora')",
    "strong_kill": "form in ['slurm', 'srun', 'kernel', 'cgroup', 'kubernetes', 'ray',"
    " 'cpu-allocator', 'numpy', 'mmap', 'errno-12', 'fork']",
    "logit_words": "mentions(top, 'logits') or mentions(top, 'cross_entropy')"
    " or mentions(top, 'log_softmax') or mentions(top, 'lm_head') or mentions(top, 'logsumexp')"
    " or mentions(top, 'entropy') or mentions(top, 'vocab_parallel')"
    " or mentions(top, 'logprob') or mentions(top, 'log_prob')",
    "layer_words": "mentions(top, 'gelu') or mentions(top, 'attention') or mentions(top, 'attn')"
    " or mentions(top, 'mlp') or mentions(top, 'softmax') or mentions(top, 'layer_norm')"
    " or mentions(top, 'layernorm') or mentions(top, 'silu') or mentions(top, 'dropout')"
    " or mentions(top, 'rotary') or mentions(top, 'checkpoint.py')",
    "collective_words": "mentions(top, 'all_gather') or mentions(top, 'reduce_scatter')"
    " or mentions(top, '_unshard') or mentions(top, 'bucket') or mentions(top, 'reducer')"
    " or mentions(top, '_sync_params') or mentions(top, 'reduce_ipg')"
    " or mentions(top, 'allreduce') or mentions(top, 'all_reduce')",
}
"""Names that stand for conditions."""

RULES: tuple[Rule, ...] = (*rules_host.RULES, *rules_device.RULES, *rules_snapshot.RULES)
