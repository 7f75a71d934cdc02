"""How do several processes train one model?  They meet, share the work, and learn when one of \
them fails."""
