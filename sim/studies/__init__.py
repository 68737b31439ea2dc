"""Studies: one file per command, each a function that returns a `sim.report.Report`."""
