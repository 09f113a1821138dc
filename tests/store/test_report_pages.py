"""A report is whole, self-contained and safe, whatever the models wrote."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tether.errors import StorageError
from tether.reports.report import (
    Chart,
    ChartGroup,
    Figure,
    Mark,
    NextStep,
    ReportContent,
    ReportFinding,
    Sample,
    ScorePart,
    Series,
    render_html,
    render_markdown,
    write_report,
)
from tether.reports.safe_text import clean, duration, escape, fenced, markdown

VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "</style></title><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x=\'',
    "a & b &lt;i&gt; &#x3c;script>",
    "--><!-- <svg onload=alert(1)>",
    "](javascript:alert(1)) ![x](https://example.invalid/x.png) <b>|</b>",
    "```\n# not a heading\n``` ````",
    "nul \x00 esc \x1b[31m half \ud83d turned \u202e back \ufeff",
    "e\u0301" + "\u0300" * 50,
]


class Page(HTMLParser):
    """Checks that tags balance, and keeps every tag, its attributes and all text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def content(words: str = "words") -> ReportContent:
    """A report in which every text is `words`."""
    chart = Chart(words, words, (Series(words, ((0, 0.1), (1, 0.4))),), words, words, words, (Mark("y", 0.2, words),))
    parts = (ScorePart(words, 0.0, 1.0), ScorePart(words, 0.5, 0.25))
    return ReportContent(
        title=words,
        subtitle=words,
        headline=(Figure(words, words, words),),
        findings=(
            ReportFinding("good", words),
            ReportFinding("note", words),
            ReportFinding("warning", f"{words}. {words}"),
        ),
        charts=(ChartGroup(words, (chart, chart), words),),
        samples=(Sample(words, words, words, 0.25, 1.0, parts), Sample(words, "", words)),
        stages=((words, 1.0), (words, 80.0)),
        recipe_text=words,
        environment={words: words},
        next_steps=(NextStep(words, words, words), NextStep(words, words)),
        before_name=words,
        after_name=words,
    )


@pytest.mark.parametrize("words", ["words", *HOSTILE])
def test_what_a_model_wrote_stays_text(words):
    plain, page = Page(render_html(content())), Page(render_html(content(words)))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert [sorted(found) for _, found in page.tags] == [sorted(found) for _, found in plain.tags]
    assert clean(words) in page.text


@pytest.mark.parametrize("words", ["words", *HOSTILE])
def test_nothing_is_fetched_or_run(words):
    page = Page(render_html(content(words)))
    for tag, found in page.tags:
        assert tag not in {"script", "iframe", "object", "embed", "base", "form"}
        assert not [name for name in found if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert not re.match(r"(?!#|data:,)", found.get(name) or "#"), f"<{tag} {name}={found.get(name)}>"
    style = next(text for text in page.words if "--paper" in text)
    assert "url(" not in style and "@import" not in style
    assert any("default-src 'none'" in (found.get("content") or "") for tag, found in page.tags if tag == "meta")


def test_ids_are_unique():
    ids = [found["id"] for _, found in Page(render_html(content())).tags if "id" in found]
    assert len(ids) == len(set(ids))


def test_every_part_is_there():
    page = Page(render_html(content("unmistakable"))).text
    for words in ("What happened", "Before and after", "Where the time went", "What to do next", "How it was made"):
        assert words in page
    assert "(an empty answer)" in page and "1 min 21 s" in page and "1.00" in page


def test_parts_of_the_rule_are_told_apart_without_colour():
    page = Page(render_html(content()))
    assert "✓" in page.text and "✗" in page.text and ", not met" in page.text and ", partly met" in page.text


def test_an_empty_report_is_a_page_with_a_title():
    page = Page(render_html(ReportContent("Nothing yet")))
    assert "Nothing yet" in page.text
    assert not [tag for tag, _ in page.tags if tag in ("section", "dl", "a")]
    assert render_markdown(ReportContent("Nothing yet")) == ("# Nothing yet\n", {})


def test_stages_without_time_or_with_bad_time():
    made = render_html(ReportContent("t", stages=(("a", 0.0), ("b", float("nan")))))
    assert "nan" not in made.partition("</head>")[2] and "unknown" in made


@pytest.mark.parametrize("words", HOSTILE)
def test_markdown_keeps_what_a_model_wrote_in_its_fence(words):
    text, charts = render_markdown(content(words), "pictures")
    text.encode()
    assert re.findall(r"!\[.*\]\((pictures/[a-z0-9-]+\.svg)\)\n", text) == [f"pictures/{name}" for name in charts]
    outside, fence = [], ""
    for line in text.split("\n"):
        mark = re.match(r"`{3,}", line)
        if fence:
            fence = "" if line == fence else fence
        elif mark:
            fence = mark[0]
        else:
            outside.append(line)
    assert not fence
    prose = "\n".join(outside)
    assert "<" not in prose.replace("\\<", "")
    assert "](javascript" not in prose and "](https" not in prose
    assert sum(line.startswith("# ") for line in outside) == 1


def test_report_files(tmp_path: Path):
    path = write_report(tmp_path / "new" / "run", content())
    assert path == tmp_path / "new" / "run" / "report.html"
    assert path.read_text(encoding="utf-8") == render_html(content())
    text = (path.parent / "report.md").read_text(encoding="utf-8")
    for link in re.findall(r"\((charts/.*?)\)", text):
        assert (path.parent / link).read_text(encoding="utf-8").startswith("<svg xmlns")
    found = sorted(str(file.relative_to(path.parent)) for file in path.parent.rglob("*") if file.is_file())
    assert found == ["charts/01-words.svg", "charts/02-words.svg", "report.html", "report.md"]


def test_a_second_report_replaces_the_first_and_leaves_other_files(tmp_path: Path):
    write_report(tmp_path, content())
    (tmp_path / "charts" / "mine.svg").write_text("mine")
    write_report(tmp_path, ReportContent("second"))
    assert [file.name for file in (tmp_path / "charts").iterdir()] == ["mine.svg"]
    assert "second" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_report(tmp_path, ReportContent("first"))

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        write_report(tmp_path, ReportContent("second"))
    assert "first" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_cleaning_leaves_signs_and_ordinary_text_alone():
    assert clean("tab\tline\nüñî 漢字 👩‍👩‍👧 عربي") == "tab\tline\nüñî 漢字 👩‍👩‍👧 عربي"
    assert clean("a\r\nb\x00\x1b\x85\u202e\ud800") == "a\nb␀␛␡��"
    assert escape('<a href="\'">&') == "&lt;a href=&quot;&#x27;&quot;&gt;&amp;"


def test_markdown_is_one_plain_line():
    assert markdown("a\n\n# b | *c*") == r"a \# b \| \*c\*"
    assert fenced("x ```` y", "text") == "`````text\nx ```` y\n`````"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.99, "10 s"), (59.6, "1 min 00 s"), (65, "1 min 05 s"), (7384, "2 h 03 min"), (-1, "unknown")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
