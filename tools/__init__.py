"""How are texts, recorded results and planted faults made? Run by whoever changes them; no \
command needs it."""
