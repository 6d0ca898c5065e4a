"""Interleaved rANS with static distributions: the entropy coder of the lossy codecs.

Range asymmetric numeral systems (Duda, 2013, arXiv 1311.2540; interleaving: Giesen, 2014, arXiv 1402.3392). A matrix of
symbols `[tokens, channels]` is coded with one static distribution per channel, or per symbol where what was decoded
before tells more. The distributions are profiled offline and are not in the stream.

The stream, exactly (little-endian):

    u32 x lanes    the decoder's first states
    u16 x words    what it reads, in the order in which it reads

States lie in [2^16, 2^32) and are refilled 16 bits at a time; probabilities have 12 bits. The channels are cut into
rows of `lanes` channels (the last row may be shorter; `lanes_for` says how many there are). Lane n decodes channel n of
the first row for all tokens, then channel n of the second row, and so on, in one state. Within a row the order is:
token by token, and in each token lane by lane; a state below 2^16 takes the next word as soon as it falls there. At the
end all states are 2^16 and all words are read, or the stream is damaged.

So one lane needs 32 bits of its own, 16 of which are lost; short records put several channels into a lane, which keeps
the loss below 3 % at 256 tokens of 1.5 bits. A GPU decodes a row's lanes side by side: the words that they read in one
step are numbered by a prefix sum.

Three coders give and take the same bytes: `reference` (numpy), `native` (numba, one core), `kernel` (Triton).
"""

from __future__ import annotations

from .coder import decode, encode, lanes_for, stream_bound
from .tables import PROBABILITY_BITS, Distributions

__all__ = ["PROBABILITY_BITS", "Distributions", "decode", "encode", "lanes_for", "stream_bound"]
