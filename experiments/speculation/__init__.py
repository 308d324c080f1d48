"""The comparison of speculative methods (paper #17, Spec-Bench): every drafter, on six kinds of text, beside plain."""
