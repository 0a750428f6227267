"""JUnit XML of the gates, for the test page of a CI system: one test case per gate and metric."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.report.document import printable
from fsdp_doctor.report.gates import gate_label

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, escaped or not."""


def render_junit(comparison: Comparison) -> str:
    """Return a ``testsuites`` document. Failed gates are failures, those that cannot be held are
    errors; unclear ones are skipped, or failures where they were asked to fail.
    """
    results = comparison.gates
    errors = sum(result.outcome == "not_comparable" for result in results)
    failures = sum(result.fails for result in results) - errors
    skipped = sum(result.outcome == "unclear" and not result.fails for result in results)
    counts = {
        "tests": str(len(results)),
        "failures": str(failures),
        "errors": str(errors),
        "skipped": str(skipped),
    }
    root = ET.Element("testsuites", counts)
    name = _text(f"fsdp-doctor compare: {comparison.name_a} -> {comparison.name_b}")
    suite = ET.SubElement(root, "testsuite", {"name": name, **counts})
    for result in results:
        names = {"classname": _text(result.gate), "name": _text(gate_label(result))}
        case = ET.SubElement(suite, "testcase", {**names, "time": "0"})
        reason = _text(result.reason)
        if result.fails:
            attributes = {"type": result.outcome, "message": reason}
            tag = "error" if result.outcome == "not_comparable" else "failure"
            ET.SubElement(case, tag, attributes).text = reason
        elif result.outcome == "unclear":
            ET.SubElement(case, "skipped", {"message": reason})
        else:
            ET.SubElement(case, "system-out").text = reason
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="UTF-8"?>\n', "\n")
    )


def _text(text: str) -> str:
    return _NOT_XML.sub("?", printable(text))
