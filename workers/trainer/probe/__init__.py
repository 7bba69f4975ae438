"""The probe: a short training run that is measured."""
