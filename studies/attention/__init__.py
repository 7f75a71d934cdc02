"""What does attention alone cost, by implementation and sequence length?"""
