"""What each optimization gains, alone and on top of others, beside its bound."""
