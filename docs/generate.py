"""Write docs/specs.md from the docstrings of fsdp_doctor/model/spec.py and megatron_spec.py.

    python docs/generate.py

A test fails when the file is not what this writes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

from fsdp_doctor.model import megatron_spec, spec

HEAD = """# Specs

A spec is one YAML file: what is trained (`workload`), how (`config`), on how many ranks
(`world_size`), and how many steps run (`steps`). Unknown keys are errors. Numbers follow YAML 1.2
(`1e-4` is a number), booleans are `true` and `false` only. `config` may also be the path of another
YAML file that holds the mapping.

`--set config.fsdp2.reshard_after_forward=false` changes one field from the command line.

This page is written by `python docs/generate.py` from the source.
"""


def sections() -> list[tuple[str, ast.ClassDef]]:
    """Return (dotted path, class) of every section, parents first."""
    bodies = [ast.parse(inspect.getsource(module)).body for module in (spec, megatron_spec)]
    classes = {
        node.name: node for body in bodies for node in body if isinstance(node, ast.ClassDef)
    }
    found: list[tuple[str, ast.ClassDef]] = []

    def visit(path: str, node: ast.ClassDef) -> None:
        found.append((path, node))
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                inner = next(
                    (
                        classes[n.id]
                        for n in ast.walk(item.annotation)
                        if isinstance(n, ast.Name) and n.id in classes
                    ),
                    None,
                )
                if inner is not None:
                    visit(f"{path}.{item.target.id}".lstrip("."), inner)

    visit("", classes["ProfileSpec"])
    return found


def field_lines(node: ast.ClassDef) -> list[str]:
    """Return one list item per field: name, type, default, meaning."""
    lines = []
    body = node.body
    for position, item in enumerate(body):
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        following = body[position + 1] if position + 1 < len(body) else None
        meaning = ""
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            meaning = " ".join(following.value.value.split())
        default = "required" if item.value is None else _default(item.value)
        kind = ast.unparse(item.annotation).replace("Literal", "one of ")
        text = f"`{item.target.id}`: {kind}; {default}." + (f" {meaning}" if meaning else "")
        lines += textwrap.wrap(
            text.replace("``", "`"), 98, initial_indent="- ", subsequent_indent="  "
        )
    return lines


def _default(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        return "default: its fields' defaults"
    written = ast.unparse(value)
    return f"default {written.lower() if written in {'True', 'False'} else written}"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for path, node in sections():
        title = f"`{path}`" if path else "Top level"
        doc = " ".join((ast.get_docstring(node) or "").split()).replace("``", "`")
        parts.append(f"\n## {title}\n\n" + "\n".join(textwrap.wrap(doc, 100)) + "\n\n")
        parts.append("\n".join(field_lines(node)) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "specs.md").write_text(page(), encoding="utf-8")
