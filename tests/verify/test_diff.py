"""Patches from hostile sources: what is refused, and that what is written anew is what was understood."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.verify.diff import DiffRefused, parse_diff, require_inside, write_diff

HUNK = "@@ -1,2 +1,2 @@\n a\n-b\n+c\n"


def diff_of(path: str, hunk: str = HUNK) -> str:
    """A plain diff of one file."""
    return f"diff --git a/{path} b/{path}\nindex 0123456..789abcd 100644\n--- a/{path}\n+++ b/{path}\n{hunk}"


def test_a_plain_patch_is_read_and_written_as_it_was() -> None:
    """Names and hunks survive; the index line, which git does not need, is gone."""
    (file,) = parse_diff(diff_of("src/a.py"))
    assert file.paths == ("src/a.py",)
    assert write_diff([file]) == diff_of("src/a.py").replace("index 0123456..789abcd 100644\n", "")


def test_new_deleted_renamed_and_moded_files() -> None:
    """Every header that git writes for plain files."""
    text = (
        "From: somebody\nSubject: words before a patch\n\n"
        "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x\n"
        "\\ No newline at end of file\n"
        "diff --git a/gone.py b/gone.py\ndeleted file mode 100755\n--- a/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        "diff --git a/one.py b/two.py\nsimilarity index 90%\nrename from one.py\nrename to two.py\n"
        "diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n"
        "diff --git a/empty.py b/empty.py\nnew file mode 100644\nindex 0000000..e69de29\n"
        "-- \n2.39.2\n"
    )
    files = parse_diff(text)
    assert [(file.old, file.new) for file in files] == [
        (None, "new.py"),
        ("gone.py", None),
        ("one.py", "two.py"),
        ("run.sh", "run.sh"),
        (None, "empty.py"),
    ]
    again = parse_diff(write_diff(files))
    assert again == files


def test_patches_without_git_headers() -> None:
    """As `diff -u` writes them, dates and all."""
    text = "--- a/x.py\t2024-01-01 00:00:00\n+++ b/x.py\t2024-01-02 00:00:00\n" + HUNK
    assert parse_diff(text)[0].paths == ("x.py",)
    assert "new file mode" in write_diff(parse_diff("--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+x\n"))


def test_lines_within_hunks_are_no_headers() -> None:
    """Hunks are counted: a removed `-- a/x` opens no file, and a fake hunk in a body moves nothing."""
    hunk = "@@ -1,3 +1,3 @@\n --- a/.git/config\n--- a/etc/passwd\n+++ b/../../etc/passwd\n @@ -1 +1 @@\n"
    (file,) = parse_diff(diff_of("a.sql", hunk))
    assert file.paths == ("a.sql",)


@pytest.mark.parametrize(
    "path",
    [
        "../x.py",
        "a/../../x.py",
        "/etc/passwd",
        ".git/hooks/pre-commit",
        "sub/.git/config",
        ".GIT/config",
        ".git./config",
        ".git /config",
        "GIT~1/config",
        ".g\u200cit/config",
        ".git\u200c/config",
        "a//b.py",
        "./a.py",
        "C:/x.py",
        "a\\..\\..\\x.py",
        "x" * 401,
        "a/\x07.py",
        "",
    ],
)
def test_paths_that_lead_out_or_into_git_are_refused(path: str) -> None:
    """Whether changed, new, or reached by a rename."""
    with pytest.raises(DiffRefused):
        require_inside(path)
    for text in (
        diff_of(path),
        f"--- a/{path}\n+++ b/{path}\n{HUNK}",
        f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n",
        f"diff --git a/x b/{path}\nsimilarity index 100%\nrename from x\nrename to {path}\n",
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n",
    ):
        with pytest.raises(DiffRefused):
            parse_diff(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("I could not solve it.", "empty"),
        ("\x00", "NUL"),
        (diff_of("a.py").replace("index 0123456..789abcd 100644", "new file mode 120000"), "symbolic link"),
        (diff_of("a.py").replace("789abcd 100644", "789abcd 120000"), "symbolic link"),
        ("diff --git a/m b/m\nnew file mode 160000\n--- /dev/null\n+++ b/m\n@@ -0,0 +1 @@\n+x\n", "submodule"),
        ("diff --git a/m b/m\nold mode 100644\nnew mode 104755\n", "104755"),
        ("diff --git a/m b/m\nindex 0..1\nGIT binary patch\nliteral 5\n", "binary"),
        ("diff --git a/m b/m\nBinary files a/m and b/m differ\n", "binary"),
        (diff_of("a.py", "@@ -1,9 +1,9 @@\n a\n"), "hunk"),
        (diff_of("a.py", "@@ -1,1 +1,1 @@\n a\n-b\n") + "", "hunk|empty|no file|does nothing"),
        (diff_of("a.py", "@@ -x +y @@\n a\n"), "no hunk"),
        (diff_of("a.py", ""), "no hunk"),
        (HUNK, "belongs to no file"),
        ("--- x.py\n+++ x.py\n" + HUNK, "begin with"),
        ("--- b/x.py\n+++ a/x.py\n" + HUNK, "begin with"),
        ("diff --git a/x.py b/y.py\n--- a/z.py\n+++ b/z.py\n" + HUNK, "unlike what follows"),
        ("diff --git a/x.py b/y.py\n", "two names"),
        ("--- /dev/null\n+++ /dev/null\n" + HUNK, "no name"),
        ("x" * 2_000_001, "at most 2000000"),
        ("".join(diff_of(f"f{number}.py") for number in range(501)), "more than 500 files"),
        ('diff --git "a/\\056\\056/x" "b/\\056\\056/x"\nnew file mode 100644\n', "leads out"),
    ],
)
def test_what_is_no_plain_patch_is_refused_with_its_reason(text: str, says: str) -> None:
    """Links, submodules, binaries, wrong counts, two names."""
    if "-1,1 +1,1" in text:
        parse_diff(text)  # the count ends the hunk; what follows it is words between files, and is not written
        assert "-b" not in write_diff(parse_diff(text))
        return
    with pytest.raises(DiffRefused, match=says):
        parse_diff(text)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet='ab -+@/\\\n"0,1.', max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing else is ever raised, and what is accepted is stable when written and read again."""
    for candidate in (text, diff_of("a.py", text), f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n{text}"):
        try:
            files = parse_diff(candidate)
        except DiffRefused:
            continue
        assert parse_diff(write_diff(files)) == files
        for file in files:
            for path in file.paths:
                require_inside(path)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(min_size=1, max_size=20))
def test_odd_names_survive_quoting(name: str) -> None:
    """A file may be called as git allows; what is written anew names the same file."""
    path = f"d/{name}.py"
    try:
        require_inside(path)
    except DiffRefused:
        return
    try:
        files = parse_diff(f"--- a/{path}\n+++ b/{path}\n{HUNK}")
    except DiffRefused:
        return
    assert parse_diff(write_diff(files)) == files
