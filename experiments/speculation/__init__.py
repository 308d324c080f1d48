"""Speculative methods compared (paper #17, Spec-Bench): every drafter, on six kinds of text, over plain decoding.

Ways of decoding, the code and machine that figures come from, and intervals are those of `experiments.grid` and
`experiments.stats`. It is no spec of `experiments.grid`, whose cells are answered one way at a time and kept as texts:
a ratio of speeds needs both sides to answer each prompt in turns, a draft's length learned in one turn to last until
the next, and an answer's equality with plain decoding both sides' token ids while the models are loaded.
"""
