"""Write docs/rules.md from the rule files of fsdp_doctor/config/rules.

    python docs/generate_rules.py

A test fails when the file is not what this writes.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

from fsdp_doctor.config.rules import load_rules
from fsdp_doctor.config.rules.schema import Rule

HEAD = """# Rules

`fsdp-doctor check` compares a config with the rules of its framework, in its version:

- **error**: the job stops, or computes wrong numbers;
- **warning**: the job runs, but not as the config says, or in a way that surprises;
- **note**: a key has no effect, or means something else than it seems to.

A rule is data: a condition on native keys, the versions it holds for, a message and a fix (see
[Adding a framework](adding-a-framework.md)). A rule is reported only when its condition is surely
true. What a config does not say can be given: `--framework-version NAME=VERSION` (of the framework
or of a package such as `torch`, `transformer-engine`, `megatron-core`), `--gpu`, `--world-size`;
rules that hang on one of these are listed as not decided.

Besides these rules a note of the rule `inert` names the written keys that have no effect in the
config as a whole, one note for each reason; `fsdp-doctor show` gives the same reasons.

This page is written by `python docs/generate_rules.py` from the rule files.

"""

LEFT_OUT = """
## Not checked

Known conditions of Megatron that no rule covers, because a config does not show them:

- what is installed: `nccl_ub` without the NCCL allocator, Megatron-FSDP without `einops`, the
  precision-aware optimizer without a TransformerEngine that has it, recomputed modules with
  TransformerEngine before 2.6;
- the model's code: the meta device with modules that have no `reset_parameters`, double buffers
  when a forward needs more than two units or the model has no unit, overlap of expert communication
  with an fp32 model, conditions on single patches or layers (CUDA graphs with recomputation in core
  0.15, partial graphs of mixture-of-experts layers with offloading, offloading of grouped MLPs);
- arguments of Python calls: `dp_outer_dim` without `hybrid_fsdp_group` and the like
  (`fully_shard`), a `no_sync_func` of one's own with `overlap_grad_reduce`;
- logs and checkpoints: core 0.19 and later write no `common.pt`, memory lines are in MiB or GB, the
  deprecation line of `GPTModel`.
"""

TITLES = {
    "megatron-lm.yaml": "Megatron-LM",
    "megatron-core.yaml": "Megatron-Core (every trainer on it)",
    "megatron-fsdp.yaml": "Megatron-FSDP",
    "megatron-bridge.yaml": "Megatron-Bridge",
    "nemo.yaml": "NeMo",
    "nemo-rl.yaml": "NeMo-RL",
    "nemo-automodel.yaml": "NeMo Automodel",
    "transformers.yaml": "Hugging Face Trainer, LLaMA-Factory",
    "accelerate.yaml": "accelerate",
    "axolotl.yaml": "axolotl",
    "deepspeed.yaml": "DeepSpeed, gpt-neox",
    "torch.yaml": "Specs (torch)",
    "torchtitan.yaml": "torchtitan",
    "torchtune.yaml": "torchtune",
    "lightning.yaml": "Lightning",
    "composer.yaml": "Composer, llm-foundry",
    "verl.yaml": "verl",
    "prime-rl.yaml": "prime-rl",
    "olmo.yaml": "OLMo",
}


def title_of(file: str) -> str:
    """Return the heading of a rule file."""
    return TITLES.get(file, file.removesuffix(".yaml"))


def versions_of(rule: Rule) -> str:
    """Return for which versions a rule holds, empty for all."""
    if rule.by_framework:
        return "; ".join(f"{name} {versions}" for name, versions in rule.by_framework.items())
    return str(rule.versions) if rule.versions.alternatives else ""


def rule_lines(rule: Rule) -> list[str]:
    """Return one list item: id, severity, versions, message, fix, condition, source."""
    versions = versions_of(rule)
    head = f"**{rule.id}** {rule.severity}" + (f", `{versions}`" if versions else "")
    condition = rule.condition.replace("`", "")
    text = (
        f"{head}: {rule.message} *Fix:* {rule.fix} *When:* `{condition}`. *Source:* {rule.source}."
    )
    return textwrap.wrap(
        text,
        100,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def page() -> str:
    """Return the whole page."""
    book = load_rules()
    files = dict.fromkeys((*TITLES, *(rule.file for rule in book.rules)))
    counts = Counter(rule.file for rule in book.rules)
    parts = [HEAD, f"| of | rules |\n|---|---|\n| all | {len(book.rules)} |\n"]
    parts += [f"| {title_of(file)} | {counts[file]} |\n" for file in files if counts[file]]
    parts.append(LEFT_OUT)
    for file in files:
        rules = [rule for rule in book.rules if rule.file == file]
        if rules:
            parts.append(f"\n## {title_of(file)}\n\n")
            parts += ["\n".join(rule_lines(rule)) + "\n" for rule in rules]
    return "".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "rules.md").write_text(page(), encoding="utf-8")
