"""Door tools/curve.py: the operating curve as a table."""

from tools.curve import ROWS, SLOWDOWNS, main


def test_table_has_a_row_per_profile_and_says_how_exact_it_is(capsys):
    assert main(["--trials", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| ") and "noise" not in line]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [title for _, _, title in ROWS]
    assert {row.count(" | ") for row in rows} == {len(SLOWDOWNS) + 1}
    assert float(rows[0].split(" | ")[5]) == 100.0, "10 % slower is always found where it is quiet"
    assert "standard error at most 7.91" in lines[-1]
