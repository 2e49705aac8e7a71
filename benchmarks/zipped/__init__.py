"""What zipped collectives give beside native ones, and the switcher's choice, on emulated networks."""
