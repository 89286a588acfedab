import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import UserError
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.instances import read_csv, write_csv

pytestmark = pytest.mark.pure

names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
whole = st.integers(-(2**40), 2**40)


@st.composite
def any_buffers(draw):
    chosen = draw(st.lists(names, unique=True, max_size=6))
    buffers = []
    for name in chosen:
        lower = draw(whole)
        buffers.append(Buffer(name, lower, lower + draw(st.integers(1, 99)), draw(st.integers(0, 2**40))))
    return buffers


@given(buffers=any_buffers(), with_layout=st.booleans())
def test_round_trip(tmp_path_factory, buffers, with_layout):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    layout = Layout({b.name: 64 * i for i, b in enumerate(buffers)}, 0, 0, 64, "by hand") if with_layout else None
    write_csv(path, buffers, layout)
    assert read_csv(path) == buffers


def test_text_by_hand(tmp_path):
    path = tmp_path / "x.csv"
    buffers = [Buffer("b1", 0, 3, 4), Buffer("b2", 3, 9, 8)]
    write_csv(path, buffers)
    assert path.read_text() == "id,lower,upper,size\nb1,0,3,4\nb2,3,9,8\n"
    write_csv(path, buffers, Layout({"b2": 0, "b1": 64}, 68, 8, 64, "by hand"))
    assert path.read_text() == "id,lower,upper,size,offset\nb1,0,3,4,64\nb2,3,9,8,0\n"


def test_columns_in_another_order(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("size,upper,note,lower,id\n4,3,hello,0,b1\n")
    assert read_csv(path) == [Buffer("b1", 0, 3, 4)]


@pytest.mark.parametrize(
    "text, line, what",
    [
        ("", 1, "no column 'id'"),
        ("id,lower,size\n", 1, "no column 'upper'"),
        ("id,lower,upper,size\na,0,1,8\nb,0,one,8\n", 3, "upper is 'one'"),
        ("id,lower,upper,size\na,0,1\n", 2, "size is None"),
        ("id,lower,upper,size\na,0,1,\n", 2, "size is ''"),
        ("id,lower,upper,size\na,0,1,8.5\n", 2, "size is '8.5'"),
        ("id,lower,upper,size\na,0,1,8\nb,5,5,8\n", 3, r"\[5, 5\) is empty"),
        ("id,lower,upper,size\na,0,1,-8\n", 2, "-8 bytes"),
        ("id,lower,upper,size\na,0,1,8\nb,0,1,8\na,1,2,8\n", 4, "'a' was already given in line 2"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, text, line, what):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"bad\.csv, line {line}: .*{what}"):
        read_csv(path)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(UserError, match=r"absent\.csv"):
        read_csv(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"id,lower,upper,size\n\xff\xfe,0,1,8\n")
    with pytest.raises(UserError, match=r"binary\.csv"):
        read_csv(tmp_path / "binary.csv")
    with pytest.raises(UserError, match=r"x\.csv"):
        write_csv(tmp_path / "no_such_folder" / "x.csv", [])
    with pytest.raises(UserError, match="no offset for buffer 'a'"):
        write_csv(tmp_path / "x.csv", [Buffer("a", 0, 1, 8)], Layout({}, 0, 0, 64, "by hand"))
