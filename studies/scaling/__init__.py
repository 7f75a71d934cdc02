"""How does training scale over ranks, and what holds it up?"""
