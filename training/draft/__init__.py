"""Draft models cut from their target and trained on its own answers (paper #161, FastDraft)."""
