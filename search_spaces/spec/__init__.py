"""What a campaign describes: model, cluster, site, search space, rules, objective and budget."""
