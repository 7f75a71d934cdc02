"""What does each rank of a scaling study do, and which faults can be planted in its steps?"""
