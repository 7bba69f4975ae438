"""Catalogues of the job knobs of trainers, and knobs that workers' files declare."""
