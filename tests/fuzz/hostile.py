"""Hostile texts for names, files and plans."""

from __future__ import annotations

from hypothesis import strategies as st

# ruff: noqa: E501

# What would leave a file behind, if any of it ran.
RUN = "open('ran', 'w')"
PAYLOADS = (
    f'A"""\n{RUN}\n"""', f"A'''\n{RUN}\n'''", f'A"; {RUN}; "', f"A\\\"; {RUN}; \\\"",
    f'A\\\n{RUN}\n', f"\n{RUN}\n#", f"\r{RUN}\r#", f"\x0c\n    {RUN}\n", f"{{{RUN}}}",
    f'"] + [{RUN}] + p["', f'f"{{{RUN}}}"', f"\u2028{RUN}\u2028", f"\x85{RUN}\x85",
    f"\x0b{RUN}", f"\x1c{RUN}\x1d\x1e", f"\x00{RUN}", '"""', '"""\\', "\\", "\\\\", '\\"', "{", "}}",
    "{i}", "w[0]", "w[:, 0:8]", "w[:]", "a b", "", " ", ".", "a.b", "#", "# coding: utf-7", "%s",
    "class", "None", "__class__", "__import__", "eval", "p", "mesh", "torch", "outputs", "forward",
    "\ud800", "\U0001f600", "\u202eeval", "\u2066", "ﬁ", "fi", "重み", "\x1b[31m", "\x1b]8;;http://x\x07",
    "[red]", "[link=http://x]y[/link]", "<script>alert(1)</script>", "from autopar.runtime.runtime import",
    "x" * 500, "٣", "0", "9" * 5000, "-", "a|b", "a:1 | b",
)  # fmt: skip

TEXTS = st.one_of(
    st.sampled_from(PAYLOADS),
    st.text(st.characters(), max_size=12),
    st.text(
        st.sampled_from("\"'\\{}[]()#\n\r\t\x0b\x0c\x1c\x85\u2028\u202e\x00;:=.@ a0"), max_size=12
    ),
    st.tuples(st.sampled_from(PAYLOADS), st.text(max_size=4)).map("".join),
)
