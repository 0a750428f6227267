"""The HTML page: safe, self-contained, reproducible."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import report_comparisons as comparisons
import report_samples as samples

from fsdp_doctor.report import render_comparison, render_runs

VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class _Page(HTMLParser):
    """Collects tags, attributes and text, and checks that elements nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def comparison_page() -> str:
    """Return the page of the sample comparison, its B side with a hostile name."""
    a, b = samples.complete_run(), samples.complete_run(samples.HOSTILE, regressed=True)
    return render_comparison(
        comparisons.sample_comparison(name_b=samples.HOSTILE), [a], [b], "html"
    )


PAGES = {
    "run": lambda: render_runs([samples.complete_run()], "html"),
    "runs": lambda: render_runs([samples.complete_run(), samples.failed_run()], "html"),
    "hostile": lambda: render_runs([samples.hostile_run()], "html"),
    "comparison": comparison_page,
    "empty": lambda: render_runs([samples.empty_run()], "html"),
}


@pytest.fixture(name="page", params=PAGES)
def page_fixture(request):
    """One of the pages."""
    return PAGES[request.param]()


def test_page_loads_nothing(page):
    """No scripts, no handlers, no address outside the page."""
    parsed = _Page(page)
    assert not parsed.tags & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    for name, value in parsed.attributes:
        assert not name.startswith("on"), name
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_page_is_well_formed(page):
    """Every element is closed in order."""
    parsed = _Page(page)
    assert parsed.open == []


def test_links_within_the_page_lead_somewhere(page):
    """Contents and footnote marks have their targets, and section ids are unique."""
    parsed = _Page(page)
    targets = {v[1:] for n, v in parsed.attributes if n == "href"}
    assert targets <= set(parsed.ids)
    sections = [i for i in parsed.ids if re.fullmatch(r"s\d+|note-\d+", i)]
    assert len(sections) == len(set(sections))


@pytest.mark.parametrize("name", ["hostile", "comparison"])
def test_hostile_names_are_shown_literally(name):
    """HTML, rich markup, math and quotes of a name are text."""
    text = "".join(_Page(PAGES[name]()).words)
    assert samples.HOSTILE.replace("\x1b", "\\x1b") in text


@pytest.mark.parametrize("fmt", ["terminal", "markdown"])
def test_rich_markup_is_shown_literally_elsewhere(fmt):
    """A name in brackets is no style."""
    text = render_runs([samples.hostile_run()], fmt).replace("\\[", "[").replace("\\]", "]")
    assert "[bold]" in text


def test_page_has_its_plots():
    """A run with everything has four plots, each with a name for those who cannot see it."""
    page = PAGES["run"]()
    assert page.count("<svg") == 4
    assert page.count('role="img"') == 4
    assert PAGES["comparison"]().count("<svg") == 4


def test_page_is_reproducible():
    """The same input gives the same bytes: no date, no random ids."""
    assert PAGES["comparison"]() == PAGES["comparison"]()
    assert PAGES["run"]() == PAGES["run"]()


def test_plots_take_their_ink_from_the_page():
    """Text of plots is readable in the light and the dark scheme."""
    page = PAGES["run"]()
    assert "currentColor" in page
    assert "#010203" not in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_no_matplotlib_settings_are_left_behind():
    """Drawing neither reads nor changes the user's matplotlib settings."""
    import matplotlib as mpl

    with mpl.rc_context({"axes.facecolor": "#123456", "svg.fonttype": "path"}):
        page = PAGES["run"]()
        assert mpl.rcParams["svg.fonttype"] == "path"
    assert "#123456" not in page
