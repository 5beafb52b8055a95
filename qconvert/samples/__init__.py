"""Request for a calibration, and the samples it reads. No torch."""
