"""Live screen and its plain-text form: a view of `Snapshot` only.

Import `inferscope.tui.app` for the screen (needs textual) and `inferscope.tui.once` for the text
(needs nothing). This package re-exports neither, so that the second never loads the first.
"""
