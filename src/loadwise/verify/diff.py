"""Read a unified diff from a hostile source, and write it anew so that nothing but what was understood is applied.

A patch that names a path outside the tree, `.git`, a link, a submodule or binary data is refused as a whole. Hunks are
read by their counts, so that a removed line `-- a/x` is no header. What is written for `git apply` comes from the
parsed parts alone: whatever another reader might see between them is gone.
"""

import re
from typing import NamedTuple

PATCH_MAX_CHARACTERS = 2_000_000
FILES_MAX = 500
PATH_MAX_CHARACTERS = 400

_HUNK = re.compile(r"@@ -([0-9]{1,9})(?:,([0-9]{1,9}))? \+([0-9]{1,9})(?:,([0-9]{1,9}))? @@")
_MODE = re.compile(r"(?:new file mode|deleted file mode|old mode|new mode) ([0-7]{6})")
_INDEX = re.compile(r"index [0-9a-f]{1,64}\.\.[0-9a-f]{1,64}(?: ([0-7]{6}))?")
_SIMILARITY = re.compile(r"(?:dis)?similarity index [0-9]{1,3}%")
_BINARY = ("GIT binary patch", "Binary files ")
_MODES = {"100644", "100755"}
_OCTAL = re.compile(r"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


class DiffRefused(ValueError):
    """A patch that is not applied; the message says why."""


class FileDiff(NamedTuple):
    """What a patch does to one file."""

    old: str | None
    """Path before; None where the file is new."""
    new: str | None
    """Path after; None where the file is deleted."""
    headers: tuple[str, ...]
    body: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that it touches."""
        return tuple(dict.fromkeys(path for path in (self.old, self.new) if path is not None))


def parse_diff(text: str) -> list[FileDiff]:
    """All files of a patch.

    Raises:
        DiffRefused: it is no patch, is too long, or touches what no patch may.
    """
    if len(text) > PATCH_MAX_CHARACTERS:
        raise DiffRefused(f"the patch has {len(text)} characters; at most {PATCH_MAX_CHARACTERS} are read")
    if "\0" in text:
        raise DiffRefused("the patch holds a NUL character")
    lines = text.split("\n")
    files: list[FileDiff] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith("diff --git ") or _is_plain_header(lines, at):
            file, at = _read_file(lines, at)
            files.append(file)
            if len(files) > FILES_MAX:
                raise DiffRefused(f"the patch touches more than {FILES_MAX} files")
        elif lines[at].startswith(_BINARY):
            raise DiffRefused("the patch holds binary data")
        elif lines[at].startswith("@@ -"):
            raise DiffRefused(f"line {at + 1} of the patch belongs to no file")
        else:
            at += 1
    if not files:
        raise DiffRefused("the patch is empty")
    return files


def write_diff(files: list[FileDiff]) -> str:
    """The patch for `git apply`."""
    lines: list[str] = []
    for file in files:
        old, new = file.old or file.new or "", file.new or file.old or ""
        lines.append(f"diff --git {_quoted('a/' + old)} {_quoted('b/' + new)}")
        lines += file.headers
        if file.body:
            lines.append(f"--- {_quoted('a/' + file.old) if file.old else '/dev/null'}")
            lines.append(f"+++ {_quoted('b/' + file.new) if file.new else '/dev/null'}")
            lines += file.body
    return "\n".join(lines) + "\n"


def require_inside(path: str) -> None:
    """Refuse a path that leads out of the tree or into git's own files.

    Raises:
        DiffRefused: it does.
    """
    parts = path.split("/")
    folded = [part.rstrip(". ").casefold() for part in parts]
    if not path or len(path) > PATH_MAX_CHARACTERS:
        raise DiffRefused(f"a path of the patch has {len(path)} characters; it must have 1 to {PATH_MAX_CHARACTERS}")
    if path.startswith("/") or "\\" in path or re.match(r"[A-Za-z]:", path):
        raise DiffRefused(f"the patch touches {path[:80]!r}, an absolute path")
    if ".." in parts or "." in parts or "" in parts:
        raise DiffRefused(f"the patch touches {path[:80]!r}, which leads out of the repository or is not plain")
    if any(part == ".git" or re.fullmatch(r"git~[0-9]{1,3}", part) for part in folded):
        raise DiffRefused(f"the patch touches {path[:80]!r}, which belongs to git")
    if not path.isprintable():
        raise DiffRefused("a path of the patch holds what is not printable")
    if any(part.startswith(".git") and part != part.encode("ascii", "ignore").decode() for part in folded):
        raise DiffRefused(f"the patch touches {path[:80]!r}, which some file systems take for .git")


def _is_plain_header(lines: list[str], at: int) -> bool:
    return (
        lines[at].startswith("--- ")
        and at + 2 < len(lines)
        and lines[at + 1].startswith("+++ ")
        and lines[at + 2].startswith("@@ -")
    )


def _read_file(lines: list[str], at: int) -> tuple[FileDiff, int]:
    names: dict[str, str | None] = {}
    headers: list[str] = []
    if lines[at].startswith("diff --git "):
        names["git"] = lines[at].removeprefix("diff --git ").rstrip("\r")
        at += 1
        while at < len(lines) and not lines[at].startswith(("diff --git ", "--- ", "@@ -")):
            if not _read_header(lines[at].rstrip("\r"), names, headers):
                break
            at += 1
    body: list[str] = []
    if at + 1 < len(lines) and lines[at].startswith("--- ") and lines[at + 1].startswith("+++ "):
        names["old"] = _side(lines[at][4:], "a/")
        names["new"] = _side(lines[at + 1][4:], "b/")
        at += 2
        while at < len(lines) and lines[at].startswith("@@ -"):
            at = _read_hunk(lines, at, body)
        if not body:
            raise DiffRefused(f"line {at + 1} of the patch is no hunk")
    elif at < len(lines) and lines[at].startswith("@@ -"):
        raise DiffRefused(f"line {at + 1} of the patch belongs to no file")
    return _made(names, headers, body), at


def _read_header(line: str, names: dict[str, str | None], headers: list[str]) -> bool:
    """Keep one header line; False where it is none, which ends the headers."""
    if line.startswith(_BINARY):
        raise DiffRefused("the patch holds binary data")
    mode = _MODE.fullmatch(line)
    index = _INDEX.fullmatch(line)
    found = mode or index
    if found:
        if found[1] is not None and found[1] not in _MODES:
            what = {"120000": "a symbolic link", "160000": "a submodule"}.get(found[1], f"mode {found[1]}")
            raise DiffRefused(f"the patch makes {what}; only plain files are allowed")
        if mode:
            headers.append(line)
            names[line[:-7]] = line
        return True
    if _SIMILARITY.fullmatch(line):
        headers.append(line)
        return True
    for word in ("rename from ", "rename to ", "copy from ", "copy to "):
        if line.startswith(word):
            path = _unquoted(line[len(word) :])
            require_inside(path)
            names["old" if word.endswith("from ") else "new"] = path
            headers.append(word + _quoted(path))
            return True
    return False


def _read_hunk(lines: list[str], at: int, body: list[str]) -> int:
    match = _HUNK.match(lines[at])
    if match is None:
        raise DiffRefused(f"line {at + 1} of the patch is no hunk")
    old, new = int(match[2] or 1), int(match[4] or 1)
    body.append(match[0])
    at += 1
    while old > 0 or new > 0:
        if at >= len(lines):
            raise DiffRefused("the patch ends within a hunk")
        line = lines[at] or " "  # mail and editors strip the blank of an empty context line
        sign = line[0]
        if sign == "\\":
            body.append(line)
            at += 1
            continue
        if sign not in " +-":
            raise DiffRefused(f"line {at + 1} of the patch is {line[:40]!r}, which is no line of a hunk")
        old -= sign in " -"
        new -= sign in " +"
        body.append(line)
        at += 1
    if old or new:
        raise DiffRefused(f"a hunk before line {at + 1} of the patch has other lines than it counts")
    if at < len(lines) and lines[at].startswith("\\"):
        body.append(lines[at])
        at += 1
    return at


def _made(names: dict[str, str | None], headers: list[str], body: list[str]) -> FileDiff:
    git = names.get("git")
    old, new = names.get("old"), names.get("new")
    if git is not None and "old" not in names and "new" not in names:
        old = new = _git_path(git)
    if "new file mode" in names:
        old = None
    if "deleted file mode" in names:
        new = None
    if old is None and new is None:
        raise DiffRefused("a file of the patch has no name")
    for path in (old, new):
        if path is not None:
            require_inside(path)
    if git is not None:
        for half in _git_halves(git, old, new):
            require_inside(half)
    if not body and not headers:
        raise DiffRefused(f"the patch does nothing to {(old or new or '')[:80]!r}")
    is_new = old is None and "new file mode" not in names
    is_gone = new is None and "deleted file mode" not in names
    made = [*headers, *(["new file mode 100644"] if is_new else []), *(["deleted file mode 100644"] if is_gone else [])]
    return FileDiff(old, new, tuple(made), tuple(body))


def _git_path(text: str) -> str:
    """The one path of `a/x b/x`, where both are the same."""
    if text.startswith('"'):
        end = text.find('" "')
        if end < 0:
            raise DiffRefused("a file of the patch has no name that can be read")
        return _stripped(_unquoted(text[: end + 1]), "a/")
    half = len(text) // 2
    left, right = text[:half], text[half + 1 :]
    if text[half : half + 1] != " " or _stripped(left, "a/") != _stripped(right, "b/"):
        raise DiffRefused("a file of the patch has two names and says not which is which")
    return _stripped(left, "a/")


def _git_halves(text: str, old: str | None, new: str | None) -> list[str]:
    """Both names of a `diff --git` line must be those of its other headers."""
    allowed = {path for path in (old, new) if path is not None}
    left = {_quoted("a/" + path) for path in allowed} | {"a/" + path for path in allowed}
    right = {_quoted("b/" + path) for path in allowed} | {"b/" + path for path in allowed}
    plain = allowed | {"/dev/null"}
    pairs = {f"{one} {two}" for one in left | plain for two in right | plain}
    if text not in pairs and _unquoted_pair(text) not in pairs:
        raise DiffRefused(f"a file of the patch is called {text[:80]!r}, unlike what follows")
    return sorted(allowed)


def _unquoted_pair(text: str) -> str:
    if not (text.startswith('"') and text.endswith('"') and '" "' in text):
        return text
    one, _, two = text.partition('" "')
    return f"{_unquoted(one + chr(34))} {_unquoted(chr(34) + two)}"


def _side(text: str, prefix: str) -> str | None:
    path = text.rstrip("\r").split("\t", 1)[0].rstrip()
    if path == "/dev/null":
        return None
    return _stripped(_unquoted(path), prefix)


def _stripped(path: str, prefix: str) -> str:
    """One leading component is dropped, as `-p1` does; it must be the usual one."""
    if not path.startswith(prefix):
        raise DiffRefused(f"the patch names {path[:80]!r}; paths begin with {prefix!r}")
    return path[len(prefix) :]


def _unquoted(path: str) -> str:
    if not (len(path) >= 2 and path.startswith('"') and path.endswith('"')):
        return path
    raw = bytearray()
    inner = path[1:-1]
    at = 0
    for match in _OCTAL.finditer(inner):
        raw += inner[at : match.start()].encode("utf-8", "surrogateescape")
        code = match[1]
        raw += bytes([int(code, 8) & 255]) if len(code) == 3 else _ESCAPES.get(code, code).encode()
        at = match.end()
    raw += inner[at:].encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "replace")


def _quoted(path: str) -> str:
    if path.isascii() and not any(char in path for char in '"\\\n\t'):
        return path
    octal = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in (34, 92) else f"\\{byte:03o}" for byte in path.encode()
    )
    return f'"{octal}"'
