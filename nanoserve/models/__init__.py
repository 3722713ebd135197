"""Models: `config` says what a checkpoint holds (no torch), `load` turns it into a `decoder` that runs."""
