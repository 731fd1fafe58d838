"""The performance table of the README is that of the newest reports."""

from benchmarks import readme


def test_the_table_comes_from_the_newest_reports() -> None:
    text = readme.README.read_text()
    assert readme.rewritten(text) == text
    assert "| torch DDP |" in text


def test_a_side_is_called_by_what_it_is() -> None:
    assert readme.name_of("alone") == "no communication"
    assert readme.name_of("package:exp") == "decent-dp 0.2.3, `exp`"
    assert readme.name_of("ours:hierarchical:bf16") == "this library, `hierarchical`, bf16 wire"
