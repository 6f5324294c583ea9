"""What several methods inherit: FedAvg, and what they have in common beyond it.

May import ``methods.fedavg`` and what methods may import.
"""
