"""Door tools/curve.py: the operating curve as a table."""

import pytest

from tools.curve import ROWS, SLOWDOWNS, main


def test_table_has_a_row_per_profile_and_says_how_exact_it_is(capsys):
    assert main(["--trials", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| ") and "noise" not in line]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [title for _, _, title in ROWS]
    assert {row.count(" | ") for row in rows} == {len(SLOWDOWNS) + 1}
    assert float(rows[0].split(" | ")[-2]) == 100.0, "10 % slower is always found where it is quiet"
    assert "standard error at most 7.91" in lines[-1]


def test_own_noise_has_the_table_for_itself(capsys):
    assert main(["--trials", "40", "--noise", "0.002,0.005", "--noise", "0.05,0.05"]) == 0
    quiet, noisy = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| between"))
    assert quiet.startswith("| between runs 0.2 %, step 0.5 % | 0.00 | ")
    assert quiet.split(" | ")[4:7] == ["100.00"] * 3
    assert float(noisy.split(" | ")[3]) < 100


def test_nights_apart_hide_a_slowdown_and_the_sensitive_preset_finds_a_small_one(capsys):
    def found(*arguments):
        assert main(["--trials", "200", *arguments]) == 0
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| between"))
        return row.removeprefix("| ").split(" | ")

    steady, of_nights = (found("--noise", f"0.001,0.006{nights}") for nights in ("", ",0.01"))
    assert of_nights[0] == f"{steady[0]}, nights 1 %"
    assert float(of_nights[4]) < float(steady[4]) == 100, "3 % slower"
    sensitive = found("--noise", "0.001,0.006", "--preset", "sensitive")
    assert float(sensitive[1]) == float(steady[2]) == 0 < 80 < float(sensitive[2]), "1 % slower"


@pytest.mark.parametrize("trials", ["0", "-4", "100001"])
def test_number_of_nights_that_no_table_can_have_is_refused(trials, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"--trials={trials}"])
    assert ended.value.code == 2
    assert f"--trials {trials}: at least one night a point, at most 100000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["fast", "0.1", "2,0.1", "-0.1,0.1", "0.1,0", "nan,0.1", "0.1,1,-1", "1,2,3,4", "1,1,nan"]
)
def test_noise_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"--noise={text}"])
    assert ended.value.code == 2
    assert f"--noise {text}: write two standard deviations as fractions" in capsys.readouterr().err
