"""The nodes of an allocation: health, quarantine, roster."""
