"""Search strategies behind one ask/tell protocol."""
