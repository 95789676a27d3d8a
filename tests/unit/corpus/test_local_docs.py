"""Documentation of installed packages: real text, in a fixed order, each package a group."""

import importlib.metadata
import inspect
import json
import platform
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from scone.corpus import Document, ReadSettings, group_parts, list_parts, read_part
from scone.corpus.local_docs import _texts_of_file
from scone.errors import CorpusError

SETTINGS = ReadSettings()


def _read(spec: str) -> list[Document]:
    return [document for part in list_parts([spec]) for document in read_part(part, SETTINGS)]


@pytest.fixture(scope="module")
def click_documents() -> list[Document]:
    return _read("local-docs:click")


def test_docstrings_of_a_package_are_documents(click_documents: list[Document]) -> None:
    import click

    texts = [document.text for document in click_documents]
    assert inspect.getdoc(click.Command) in texts
    assert {(document.source, document.group) for document in click_documents} == {("click", "click")}
    assert any(document.doc_id.startswith("click/core.py:") for document in click_documents)


def test_package_description_is_a_document(click_documents: list[Document]) -> None:
    assert click_documents[0].doc_id == "METADATA"
    assert "command line" in click_documents[0].text


def test_documents_have_distinct_places_and_a_fixed_order(click_documents: list[Document]) -> None:
    assert len({document.doc_id for document in click_documents}) == len(click_documents)
    assert _read("local-docs:click") == click_documents


def test_standard_library_has_docstrings_and_help_topics() -> None:
    (part,) = list_parts(["local-docs:stdlib"])
    documents = list(read_part(replace(part, stop=3), SETTINGS))
    places = [document.doc_id for document in documents]
    assert part.version == platform.python_version()
    assert "help:assert" in places
    assert any(place.endswith(".py:1") for place in places)


def test_cutting_a_package_loses_and_doubles_nothing(click_documents: list[Document]) -> None:
    groups = group_parts(list_parts(["local-docs:click"]), unit_bytes=50_000)
    assert len(groups) > 3
    assert [d for group in groups for part in group for d in read_part(part, SETTINGS)] == click_documents


def test_everything_installed_is_listed_once_and_in_order() -> None:
    names = [part.source for part in list_parts(["local-docs:"])]
    assert names[0] == "stdlib"
    assert names[1:] == sorted(set(names[1:]))
    assert {"numpy", "pytest", "typing-extensions"} <= set(names)
    assert "scone" not in names


def test_package_names_are_normalized_and_described() -> None:
    (part,) = list_parts(["local-docs:Typing_Extensions"])
    assert (part.source, part.version) == ("typing-extensions", importlib.metadata.version("typing_extensions"))


def test_package_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(CorpusError, match=r"package 'numpi' is not installed here; did you mean numpy\?"):
        list_parts(["local-docs:numpi"])
    with pytest.raises(CorpusError, match="'qqqqqqqq' is not installed here; local-docs:stdlib is always there"):
        list_parts(["local-docs:qqqqqqqq"])


def test_another_version_on_this_host_is_an_error() -> None:
    (part,) = list_parts(["local-docs:click"])
    with pytest.raises(CorpusError, match=r"click 0\.0 was listed, but .* has \d.*; install the same packages"):
        list(read_part(replace(part, version="0.0"), SETTINGS))
    with pytest.raises(CorpusError, match="has none; install the same packages"):
        list(read_part(replace(part, location="gone"), SETTINGS))


def test_docstrings_are_found_wherever_definitions_stand(tmp_path: Path) -> None:
    long = "that is long enough to be kept, since it says more than the name below which it stands does"
    (tmp_path / "m.py").write_text(
        textwrap.dedent(f'''\
        """Module {long}."""
        if True:
            class A:
                """Class {long}."""
                def f(self):
                    """Short."""
                    async def g():
                        """Inner {long}."""
        try:
            pass
        except ValueError:
            def h():
                """Handler {long}."""
        text = """No docstring {long}."""
        ''')
    )
    found = _texts_of_file(tmp_path / "m.py")
    assert [(line, text.split()[0]) for line, text in found] == [
        (1, "Module"),
        (4, "Class"),
        (8, "Inner"),
        (13, "Handler"),
    ]


@pytest.mark.parametrize("content", ['"""open', "def f(:\n    '''x'''", "'''\0'''", json.dumps("x" * 100)])
def test_files_without_readable_docstrings_are_passed_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.py").write_text(content)
    assert _texts_of_file(tmp_path / "m.py") == []
    assert _texts_of_file(tmp_path / "absent.py") == []


def test_docstring_that_is_no_unicode_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text('"""' + "x" * 100 + '\\ud800"""')
    assert _texts_of_file(tmp_path / "m.py") == []


def test_readme_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title\n" + "words " * 30)
    ((line, text),) = _texts_of_file(tmp_path / "README.md")
    assert line == 1
    assert text.startswith("# Title")
