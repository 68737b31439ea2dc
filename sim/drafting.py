"""One drafter's rounds, drawn one after the other. A template, as `sim.decoding` is."""

from metasd_bandits.compiled.lean import lean
from sim.defaults import begin, draft  # bound by specialise


@lean(cache=True, nogil=True)
def run(model, memory, arm, place, stream, in_a_row, accepted, efficiency, divergence):
    """Fill the three arrays; a new query begins every `in_a_row` rounds."""
    for r in range(accepted.size):
        if r % in_a_row == 0:
            begin(model, memory, stream)
        accepted[r], efficiency[r], divergence[r] = draft(model, memory, arm, place, stream)
