"""The live screen and its plain-text twin: a view of `Snapshot`, and of nothing else.

Import `inferscope.tui.app` for the screen (needs textual) and `inferscope.tui.once` for the text
(needs nothing); this package re-exports neither, so that the second never loads the first.
"""
