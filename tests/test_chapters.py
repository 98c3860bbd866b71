"""The chapters of this book follow the conventions, and each is checked by nbval or says why not."""

import re

import pytest
import toybook

from pa_core import chapters, references

BOOK = chapters.read_book(toybook.REPOSITORY)


@pytest.mark.parametrize("chapter", BOOK.chapters, ids=lambda chapter: chapter.name)
def test_a_chapter_has_a_current_reference(chapter):
    path = references.reference_folder(BOOK.root) / f"{chapter.name}.ipynb"
    if chapter.unchecked:
        assert not path.exists()
    else:
        assert path.exists(), "run `make accept`"
        assert references.problems(references.read_reference(path), chapter) == []


@pytest.mark.parametrize("chapter", BOOK.chapters, ids=lambda chapter: chapter.name)
def test_figures_have_captions_and_words_for_those_who_cannot_see_them(chapter):
    for cell in chapter.code_cells:
        meta = cell.metadata.get("mystnb", {})
        if re.search(r"\bplt\.show\(\)", cell.source):
            figure = meta.get("figure", {})
            assert figure.get("name") and figure.get("caption"), f"no caption: {cell.source[:60]}"
            assert len(meta.get("image", {}).get("alt", "")) > 20, f"no alt text: {figure['name']}"


@pytest.mark.parametrize("chapter", BOOK.chapters, ids=lambda chapter: chapter.name)
def test_no_output_holds_a_memory_address(chapter):
    """A pandas Styler draws a random id and prints its address, so two builds of the book would differ."""
    assert not [cell.source for cell in chapter.code_cells if re.search(r"\.style\b", cell.source)]


def test_every_page_in_the_folder_is_in_the_book():
    assert {path for path in (BOOK.root / "chapters").glob("*.md")} == set(BOOK.pages)
