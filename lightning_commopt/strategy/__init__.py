"""The strategies for Trainers and for Fabric, and what they share."""
