"""What a calibration is asked for, and the samples it reads. No torch."""
