"""Door tools/curve.py: the operating curve as a table."""

import pytest

from tools.curve import ROWS, SLOWDOWNS, main


def test_table_has_a_row_per_profile_and_says_how_exact_it_is(capsys):
    assert main(["--trials", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| ") and "noise" not in line]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [title for _, _, title in ROWS]
    assert {row.count(" | ") for row in rows} == {len(SLOWDOWNS) + 1}
    assert float(rows[0].split(" | ")[5]) == 100.0, "10 % slower is always found where it is quiet"
    assert "standard error at most 7.91" in lines[-1]


def test_own_noise_has_the_table_for_itself(capsys):
    assert main(["--trials", "40", "--noise", "0.002,0.005", "--noise", "0.05,0.05"]) == 0
    quiet, noisy = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| between"))
    assert quiet.startswith("| between runs 0.2 %, step 0.5 % | 0.00 | ")
    assert quiet.split(" | ")[3:6] == ["100.00"] * 3
    assert float(noisy.split(" | ")[2]) < 100


@pytest.mark.parametrize("text", ["fast", "0.1", "2,0.1", "-0.1,0.1", "0.1,0", "nan,0.1", "0.1,0.1,0.1"])
def test_noise_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"--noise={text}"])
    assert ended.value.code == 2
    assert f"--noise {text}: write two standard deviations as fractions" in capsys.readouterr().err
