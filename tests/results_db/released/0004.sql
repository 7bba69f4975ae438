BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0004');
CREATE TABLE analyses (
	campaign_id INTEGER NOT NULL, 
	winner_id INTEGER NOT NULL, 
	objective VARCHAR(40) NOT NULL, 
	num_trials INTEGER NOT NULL, 
	last_ended_seq INTEGER NOT NULL, 
	method VARCHAR(200) NOT NULL, 
	computed_at DATETIME NOT NULL, 
	CONSTRAINT pk_analyses PRIMARY KEY (campaign_id), 
	CONSTRAINT fk_analyses_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id) ON DELETE CASCADE, 
	CONSTRAINT fk_analyses_winner_id FOREIGN KEY(winner_id) REFERENCES trials (id) ON DELETE CASCADE
);
INSERT INTO "analyses" VALUES(2,4,'tokens_per_s',9,12,'fANOVA','2026-01-01 12:02:25.000000');
CREATE TABLE attempts (
	trial_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	worker_id VARCHAR(32) NOT NULL, 
	started_at DATETIME NOT NULL, 
	seen_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	ending VARCHAR(16), 
	node_seconds DOUBLE NOT NULL, 
	CONSTRAINT pk_attempts PRIMARY KEY (trial_id, attempt), 
	CONSTRAINT ck_attempts_ending CHECK (ending IN ('reported', 'lost', 'returned', 'superseded')), 
	CONSTRAINT ck_attempts_ended_has_an_ending CHECK ((ending IS NULL) = (ended_at IS NULL)), 
	CONSTRAINT fk_attempts_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE, 
	CONSTRAINT fk_attempts_worker_id FOREIGN KEY(worker_id) REFERENCES workers (id)
);
INSERT INTO "attempts" VALUES(1,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:01:01.000000','2026-01-01 12:01:05.000000','2026-01-01 12:01:05.000000','reported',4.0);
INSERT INTO "attempts" VALUES(2,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:01:06.000000','2026-01-01 12:01:10.000000','2026-01-01 12:01:10.000000','reported',4.0);
INSERT INTO "attempts" VALUES(3,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:01:11.000000','2026-01-01 12:01:15.000000','2026-01-01 12:01:15.000000','reported',4.0);
INSERT INTO "attempts" VALUES(4,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:02:16.000000','2026-01-01 12:02:20.000000','2026-01-01 12:02:20.000000','reported',4.0);
INSERT INTO "attempts" VALUES(5,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:02:21.000000','2026-01-01 12:02:25.000000','2026-01-01 12:02:25.000000','reported',4.0);
INSERT INTO "attempts" VALUES(14,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:03:26.000000','2026-01-01 12:03:30.000000','2026-01-01 12:03:30.000000','reported',4.0);
INSERT INTO "attempts" VALUES(15,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:03:31.000000','2026-01-01 12:03:35.000000','2026-01-01 12:03:35.000000','reported',4.0);
INSERT INTO "attempts" VALUES(16,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:03:36.000000','2026-01-01 12:03:40.000000','2026-01-01 12:03:40.000000','reported',4.0);
INSERT INTO "attempts" VALUES(17,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:03:41.000000','2026-01-01 12:03:45.000000','2026-01-01 12:03:45.000000','reported',4.0);
INSERT INTO "attempts" VALUES(18,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:03:46.000000','2026-01-01 12:03:50.000000','2026-01-01 12:03:50.000000','reported',4.0);
INSERT INTO "attempts" VALUES(19,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:03:51.000000','2026-01-01 12:03:55.000000','2026-01-01 12:03:55.000000','reported',4.0);
INSERT INTO "attempts" VALUES(20,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:03:56.000000','2026-01-01 12:04:00.000000','2026-01-01 12:04:00.000000','reported',4.0);
INSERT INTO "attempts" VALUES(21,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:04:01.000000','2026-01-01 12:04:05.000000','2026-01-01 12:04:05.000000','reported',4.0);
INSERT INTO "attempts" VALUES(22,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:04:06.000000','2026-01-01 12:04:10.000000','2026-01-01 12:04:10.000000','reported',4.0);
INSERT INTO "attempts" VALUES(23,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:04:11.000000','2026-01-01 12:04:15.000000','2026-01-01 12:04:15.000000','reported',4.0);
INSERT INTO "attempts" VALUES(24,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:04:16.000000','2026-01-01 12:04:20.000000','2026-01-01 12:04:20.000000','reported',4.0);
INSERT INTO "attempts" VALUES(25,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:04:21.000000','2026-01-01 12:04:21.000000','2026-01-01 12:06:01.000000','lost',0.0);
INSERT INTO "attempts" VALUES(25,2,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:06:02.000000','2026-01-01 12:06:05.000000','2026-01-01 12:06:05.000000','reported',4.0);
INSERT INTO "attempts" VALUES(26,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:07:06.000000','2026-01-01 12:07:06.000000','2026-01-01 12:07:06.000000','reported',4.0);
INSERT INTO "attempts" VALUES(28,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:08:07.000000','2026-01-01 12:08:11.000000','2026-01-01 12:08:11.000000','reported',4.0);
INSERT INTO "attempts" VALUES(30,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:09:12.000000','2026-01-01 12:09:16.000000','2026-01-01 12:09:16.000000','reported',4.0);
INSERT INTO "attempts" VALUES(31,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:09:17.000000','2026-01-01 12:09:21.000000','2026-01-01 12:09:21.000000','reported',4.0);
INSERT INTO "attempts" VALUES(32,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:09:22.000000','2026-01-01 12:09:26.000000','2026-01-01 12:09:26.000000','reported',4.0);
INSERT INTO "attempts" VALUES(33,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:09:27.000000','2026-01-01 12:09:31.000000','2026-01-01 12:09:31.000000','reported',4.0);
INSERT INTO "attempts" VALUES(34,1,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:09:32.000000','2026-01-01 12:09:32.000000',NULL,NULL,0.0);
CREATE TABLE breakdowns (
	trial_id INTEGER NOT NULL, 
	compute_s DOUBLE NOT NULL, 
	tp_s DOUBLE NOT NULL, 
	pp_s DOUBLE NOT NULL, 
	dp_s DOUBLE NOT NULL, 
	optimizer_s DOUBLE NOT NULL, 
	unexplained_s DOUBLE NOT NULL, 
	CONSTRAINT pk_breakdowns PRIMARY KEY (trial_id), 
	CONSTRAINT fk_breakdowns_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);
INSERT INTO "breakdowns" VALUES(1,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(2,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(3,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(4,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(5,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(14,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(15,1.89629629629629620213e-01,7.58518518518518508608e-02,3.79259259259259254304e-02,3.79259259259259254304e-02,2.37037037037037025266e-02,1.4222222222222221169e-02);
INSERT INTO "breakdowns" VALUES(16,2.24561403508771934012e-01,8.9824561403508779156e-02,4.4912280701754389578e-02,4.4912280701754389578e-02,2.80701754385964917515e-02,1.6842105263157894357e-02);
INSERT INTO "breakdowns" VALUES(17,1.71812080536912742401e-01,0.0687248322147651,3.43624161073825470924e-02,3.43624161073825470924e-02,2.14765100671140928001e-02,1.2885906040268456027e-02);
INSERT INTO "breakdowns" VALUES(18,0.2,8.00000000000000155431e-02,4.00000000000000077715e-02,4.00000000000000077715e-02,0.025,0.015);
INSERT INTO "breakdowns" VALUES(19,2.3925233644859814075e-01,9.57009345794392618511e-02,4.78504672897196309255e-02,4.78504672897196309255e-02,2.99065420560747675937e-02,1.79439252336448598623e-02);
INSERT INTO "breakdowns" VALUES(20,1.80281690140845080039e-01,7.21126760563380320157e-02,3.60563380281690160078e-02,3.60563380281690160078e-02,2.25352112676056350049e-02,1.35211267605633810029e-02);
INSERT INTO "breakdowns" VALUES(21,2.1157024793388429229e-01,8.46280991735537252429e-02,4.23140495867768626214e-02,4.23140495867768626214e-02,2.64462809917355365363e-02,1.58677685950413226156e-02);
INSERT INTO "breakdowns" VALUES(22,2.30423042304230413224e-01,9.21692169216921652896e-02,4.60846084608460826448e-02,4.60846084608460826448e-02,0.0288028802880288,1.72817281728172809918e-02);
INSERT INTO "breakdowns" VALUES(25,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(28,0.256,0.1024,0.0512,0.0512,0.032,0.0192);
INSERT INTO "breakdowns" VALUES(30,2.84444444444444444197e-01,1.1377777777777778323e-01,5.68888888888888916151e-02,5.68888888888888916151e-02,3.55555555555555555247e-02,2.13333333333333326209e-02);
INSERT INTO "breakdowns" VALUES(31,2.81009879253567518286e-01,1.12403951701427015641e-01,5.62019758507135078207e-02,5.62019758507135078207e-02,3.51262349066959397858e-02,2.10757409440175645654e-02);
INSERT INTO "breakdowns" VALUES(32,2.77657266811279834772e-01,1.1106290672451193946e-01,5.55314533622559697301e-02,5.55314533622559697301e-02,3.47071583514099793466e-02,2.0824295010845986914e-02);
INSERT INTO "breakdowns" VALUES(33,2.74383708467309750389e-01,1.09753483386923908482e-01,5.48767416934619542412e-02,5.48767416934619542412e-02,3.42979635584137187986e-02,2.05787781350482319731e-02);
CREATE TABLE campaigns (
	id INTEGER NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason VARCHAR(40), 
	message TEXT NOT NULL, 
	spec JSON NOT NULL, 
	model_name VARCHAR(200) NOT NULL, 
	cluster_name VARCHAR(200) NOT NULL, 
	objective VARCHAR(40) NOT NULL, 
	strategy VARCHAR(40) NOT NULL, 
	num_legal_layouts BIGINT NOT NULL, 
	last_number INTEGER NOT NULL, 
	last_ended_seq INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	node_seconds DOUBLE NOT NULL, 
	wall_time_s DOUBLE NOT NULL, 
	clock_at DATETIME, max_peak_memory_bytes BIGINT, 
	CONSTRAINT pk_campaigns PRIMARY KEY (id), 
	CONSTRAINT ck_campaigns_ended_has_a_time CHECK ((state IN ('RUNNING', 'PAUSED')) = (ended_at IS NULL)), 
	CONSTRAINT ck_campaigns_ended_has_a_reason CHECK ((state IN ('RUNNING', 'PAUSED')) = (reason IS NULL)), 
	CONSTRAINT ck_campaigns_state CHECK (state IN ('RUNNING', 'PAUSED', 'COMPLETED', 'CANCELLED', 'FAILED')), 
	CONSTRAINT ck_campaigns_costs_not_negative CHECK (node_seconds >= 0 AND wall_time_s >= 0), 
	CONSTRAINT uq_campaigns_name UNIQUE (name)
);
INSERT INTO "campaigns" VALUES(1,'off','COMPLETED','exhausted','all 3 legal layouts were tried','{"name": "off", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "host_operation_s": 1e-05, "intra_node_latency_s": 3.4e-06, "inter_node_latency_s": 1.4e-05, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "zero_replicas": 1, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "constraints": {"memory_headroom": 0.0}, "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0, "compile": false}, "stop": {"early": true, "converged_within": null, "remeasure": 3}, "knowledge": "auto", "start_from": [], "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,3,3,'2026-01-01 12:01:00.000000','2026-01-01 12:01:01.000000','2026-01-01 12:01:15.000000',12.0,15.0,NULL,NULL);
INSERT INTO "campaigns" VALUES(2,'two-goals','RUNNING',NULL,'','{"name": "two-goals", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "host_operation_s": 1e-05, "intra_node_latency_s": 3.4e-06, "inter_node_latency_s": 1.4e-05, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "zero_replicas": 1, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": ["tokens_per_s", "tokens_per_node_hour"], "constraints": {"memory_headroom": 0.1}, "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0, "compile": false}, "stop": {"early": true, "converged_within": null, "remeasure": 3}, "knowledge": "auto", "start_from": [], "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,2,2,'2026-01-01 12:02:15.000000','2026-01-01 12:02:16.000000',NULL,8.0,25.0,'2026-01-01 12:09:32.000000',7730941132);
INSERT INTO "campaigns" VALUES(3,'theirs','COMPLETED','imported','8 rows of a measurement table from made up','{"name": "theirs", "model": {"name": "small-gpt", "family": "gpt", "num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 2048, "num_heads": 8, "num_kv_heads": 8, "seq_length": 512, "vocab_size": 8192, "tied_embeddings": true}, "cluster": {"name": "testbox", "device": "unknown device", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 17179869184, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "host_operation_s": 1e-05, "intra_node_latency_s": 3.4e-06, "inter_node_latency_s": 1.4e-05, "source": "generic constants"}, "objective": "tokens_per_s_per_device", "strategy": "random", "budget": {"trials": 10, "node_hours": null, "wall_time_s": null}}','small-gpt','testbox','tokens_per_s_per_device','imported',7,8,8,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',0.0,0.0,NULL,NULL);
INSERT INTO "campaigns" VALUES(4,'pilot','COMPLETED','budget','40 of 40 trials done','{"name": "pilot", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "host_operation_s": 1e-05, "intra_node_latency_s": 3.4e-06, "inter_node_latency_s": 1.4e-05, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "zero_replicas": 1, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "constraints": {"memory_headroom": 0.0}, "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0, "compile": false}, "stop": {"early": true, "converged_within": null, "remeasure": 3}, "knowledge": "auto", "start_from": [], "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,12,12,'2026-01-01 12:03:25.000000','2026-01-01 12:03:26.000000','2026-01-01 12:06:05.000000',48.0,15.0,NULL,NULL);
INSERT INTO "campaigns" VALUES(5,'given-up','CANCELLED','cancelled','cancelled by the user','{"name": "given-up", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "host_operation_s": 1e-05, "intra_node_latency_s": 3.4e-06, "inter_node_latency_s": 1.4e-05, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "zero_replicas": 1, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "constraints": {"memory_headroom": 0.0}, "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0, "compile": false}, "stop": {"early": true, "converged_within": null, "remeasure": 3}, "knowledge": "auto", "start_from": [], "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,2,2,'2026-01-01 12:07:05.000000','2026-01-01 12:07:06.000000','2026-01-01 12:07:06.000000',4.0,1.0,NULL,NULL);
INSERT INTO "campaigns" VALUES(6,'on-hold','PAUSED',NULL,'','{"name": "on-hold", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "host_operation_s": 1e-05, "intra_node_latency_s": 3.4e-06, "inter_node_latency_s": 1.4e-05, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "zero_replicas": 1, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "constraints": {"memory_headroom": 0.0}, "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0, "compile": false}, "stop": {"early": true, "converged_within": null, "remeasure": 3}, "knowledge": "auto", "start_from": [], "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,2,1,'2026-01-01 12:08:06.000000','2026-01-01 12:08:07.000000',NULL,4.0,5.0,NULL,NULL);
INSERT INTO "campaigns" VALUES(7,'at-work','RUNNING',NULL,'','{"name": "at-work", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "host_operation_s": 1e-05, "intra_node_latency_s": 3.4e-06, "inter_node_latency_s": 1.4e-05, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "zero_replicas": 1, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "constraints": {"memory_headroom": 0.0}, "strategy": "random", "seed": 8, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0, "compile": false}, "stop": {"early": true, "converged_within": null, "remeasure": 3}, "knowledge": "auto", "start_from": [], "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,6,4,'2026-01-01 12:09:11.000000','2026-01-01 12:09:12.000000',NULL,16.0,15.0,'2026-01-01 12:09:32.000000',NULL);
CREATE TABLE driver_beats (
	name VARCHAR(40) NOT NULL, 
	seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_driver_beats PRIMARY KEY (name)
);
INSERT INTO "driver_beats" VALUES('driver','2026-01-01 12:09:32.000000');
CREATE TABLE environments (
	trial_id INTEGER NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	backend VARCHAR(40) NOT NULL, 
	python_version VARCHAR(80) NOT NULL, 
	torch_version VARCHAR(80) NOT NULL, 
	numpy_version VARCHAR(80) NOT NULL, 
	git_revision VARCHAR(80) NOT NULL, 
	CONSTRAINT pk_environments PRIMARY KEY (trial_id), 
	CONSTRAINT fk_environments_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);
INSERT INTO "environments" VALUES(1,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(2,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(3,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(4,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(5,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(14,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(15,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(16,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(17,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(18,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(19,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(20,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(21,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(22,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(25,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(28,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(30,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(31,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(32,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(33,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
CREATE TABLE imported_rows (
	trial_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	line INTEGER NOT NULL, 
	unstated JSON NOT NULL, 
	aside JSON NOT NULL, 
	peak_memory_bytes BIGINT, 
	CONSTRAINT pk_imported_rows PRIMARY KEY (trial_id), 
	CONSTRAINT fk_imported_rows_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);
INSERT INTO "imported_rows" VALUES(6,1,2,'[]','{"colour": ""}',NULL);
INSERT INTO "imported_rows" VALUES(7,2,3,'[]','{"colour": ""}',NULL);
INSERT INTO "imported_rows" VALUES(8,3,4,'[]','{"colour": ""}',NULL);
INSERT INTO "imported_rows" VALUES(9,4,5,'[]','{"colour": ""}',NULL);
INSERT INTO "imported_rows" VALUES(10,5,6,'[]','{"colour": ""}',NULL);
INSERT INTO "imported_rows" VALUES(11,6,7,'[]','{"colour": ""}',3000000000);
INSERT INTO "imported_rows" VALUES(12,7,8,'[]','{"colour": ""}',NULL);
INSERT INTO "imported_rows" VALUES(13,8,9,'["vpp", "sequence_parallel", "zero_stage"]','{"colour": "red"}',NULL);
CREATE TABLE imports (
	campaign_id INTEGER NOT NULL, 
	source VARCHAR(1000) NOT NULL, 
	aside_columns JSON NOT NULL, 
	CONSTRAINT pk_imports PRIMARY KEY (campaign_id), 
	CONSTRAINT fk_imports_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id) ON DELETE CASCADE
);
INSERT INTO "imports" VALUES(3,'made up','["colour"]');
CREATE TABLE "iterations" (
	trial_id INTEGER NOT NULL, 
	"index" INTEGER NOT NULL, 
	kind VARCHAR(8) NOT NULL, 
	step_time_s DOUBLE NOT NULL, 
	loss DOUBLE NOT NULL, 
	grad_norm DOUBLE, 
	CONSTRAINT pk_iterations PRIMARY KEY (trial_id, "index"), 
	CONSTRAINT ck_iterations_kind CHECK (kind IN ('warmup', 'timed')), 
	CONSTRAINT ck_iterations_kind CHECK (kind IN ('warmup', 'timed')), 
	CONSTRAINT fk_iterations_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);
INSERT INTO "iterations" VALUES(1,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(1,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(1,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(1,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(1,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(2,0,'warmup',0.512,9.0,1.5);
INSERT INTO "iterations" VALUES(2,1,'warmup',0.512,8.9,1.5);
INSERT INTO "iterations" VALUES(2,2,'timed',0.512,8.8,1.5);
INSERT INTO "iterations" VALUES(2,3,'timed',0.512,8.7,1.5);
INSERT INTO "iterations" VALUES(2,4,'timed',0.512,8.6,1.5);
INSERT INTO "iterations" VALUES(3,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(3,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(3,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(3,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(3,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(4,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(4,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(4,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(4,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(4,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(5,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(5,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(5,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(5,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(5,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(14,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(14,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(14,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(14,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(14,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(15,0,'warmup',3.79259259259259240426e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(15,1,'warmup',3.79259259259259240426e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(15,2,'timed',3.79259259259259240426e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(15,3,'timed',3.79259259259259240426e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(15,4,'timed',3.79259259259259240426e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(16,0,'warmup',4.49122807017543868024e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(16,1,'warmup',4.49122807017543868024e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(16,2,'timed',4.49122807017543868024e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(16,3,'timed',4.49122807017543868024e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(16,4,'timed',4.49122807017543868024e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(17,0,'warmup',3.43624161073825484802e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(17,1,'warmup',3.43624161073825484802e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(17,2,'timed',3.43624161073825484802e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(17,3,'timed',3.43624161073825484802e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(17,4,'timed',3.43624161073825484802e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(18,0,'warmup',0.4,6.0,1.5);
INSERT INTO "iterations" VALUES(18,1,'warmup',0.4,5.9,1.5);
INSERT INTO "iterations" VALUES(18,2,'timed',0.4,5.8,1.5);
INSERT INTO "iterations" VALUES(18,3,'timed',0.4,5.7,1.5);
INSERT INTO "iterations" VALUES(18,4,'timed',0.4,5.6,1.5);
INSERT INTO "iterations" VALUES(19,0,'warmup',4.785046728971962815e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(19,1,'warmup',4.785046728971962815e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(19,2,'timed',4.785046728971962815e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(19,3,'timed',4.785046728971962815e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(19,4,'timed',4.785046728971962815e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(20,0,'warmup',3.60563380281690160078e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(20,1,'warmup',3.60563380281690160078e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(20,2,'timed',3.60563380281690160078e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(20,3,'timed',3.60563380281690160078e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(20,4,'timed',3.60563380281690160078e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(21,0,'warmup',4.23140495867768584581e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(21,1,'warmup',4.23140495867768584581e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(21,2,'timed',4.23140495867768584581e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(21,3,'timed',4.23140495867768584581e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(21,4,'timed',4.23140495867768584581e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(22,0,'warmup',4.60846084608460826448e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(22,1,'warmup',4.60846084608460826448e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(22,2,'timed',4.60846084608460826448e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(22,3,'timed',4.60846084608460826448e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(22,4,'timed',4.60846084608460826448e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(25,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(25,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(25,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(25,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(25,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(28,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(28,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(28,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(28,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(28,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(30,0,'warmup',5.68888888888888888395e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(30,1,'warmup',5.68888888888888888395e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(30,2,'timed',5.68888888888888888395e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(30,3,'timed',5.68888888888888888395e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(30,4,'timed',5.68888888888888888395e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(31,0,'warmup',0.562019758507135,6.0,1.5);
INSERT INTO "iterations" VALUES(31,1,'warmup',0.562019758507135,5.9,1.5);
INSERT INTO "iterations" VALUES(31,2,'timed',0.562019758507135,5.8,1.5);
INSERT INTO "iterations" VALUES(31,3,'timed',0.562019758507135,5.7,1.5);
INSERT INTO "iterations" VALUES(31,4,'timed',0.562019758507135,5.6,1.5);
INSERT INTO "iterations" VALUES(32,0,'warmup',5.55314533622559669545e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(32,1,'warmup',5.55314533622559669545e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(32,2,'timed',5.55314533622559669545e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(32,3,'timed',5.55314533622559669545e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(32,4,'timed',5.55314533622559669545e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(33,0,'warmup',5.48767416934619500779e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(33,1,'warmup',5.48767416934619500779e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(33,2,'timed',5.48767416934619500779e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(33,3,'timed',5.48767416934619500779e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(33,4,'timed',5.48767416934619500779e-01,5.6,1.5);
CREATE TABLE knob_importances (
	campaign_id INTEGER NOT NULL, 
	knob VARCHAR(40) NOT NULL, 
	importance DOUBLE NOT NULL, 
	CONSTRAINT pk_knob_importances PRIMARY KEY (campaign_id, knob), 
	CONSTRAINT ck_knob_importances_is_a_share CHECK (importance >= 0 AND importance <= 1), 
	CONSTRAINT fk_knob_importances_campaign_id FOREIGN KEY(campaign_id) REFERENCES analyses (campaign_id) ON DELETE CASCADE
);
INSERT INTO "knob_importances" VALUES(2,'tp',0.7);
INSERT INTO "knob_importances" VALUES(2,'micro_batch_size',0.2);
INSERT INTO "knob_importances" VALUES(2,'pp',0.1);
CREATE TABLE knob_steps (
	campaign_id INTEGER NOT NULL, 
	knob VARCHAR(40) NOT NULL, 
	direction VARCHAR(4) NOT NULL, 
	value VARCHAR(40) NOT NULL, 
	stepped_value VARCHAR(40) NOT NULL, 
	also VARCHAR(200) NOT NULL, 
	layout_key VARCHAR(120) NOT NULL, 
	source VARCHAR(10) NOT NULL, 
	state VARCHAR(14) NOT NULL, 
	effect DOUBLE, 
	is_apart BOOLEAN, 
	trial_id INTEGER, 
	CONSTRAINT pk_knob_steps PRIMARY KEY (campaign_id, knob, direction), 
	CONSTRAINT ck_knob_steps_direction CHECK (direction IN ('down', 'up')), 
	CONSTRAINT ck_knob_steps_source CHECK (source IN ('measured', 'predicted')), 
	CONSTRAINT ck_knob_steps_state CHECK (state IN ('completed', 'out_of_memory', 'failed')), 
	CONSTRAINT ck_knob_steps_ran_or_not CHECK ((state = 'completed') = (effect IS NOT NULL)), 
	CONSTRAINT ck_knob_steps_measured CHECK (source = 'measured' OR (trial_id IS NULL AND is_apart IS NULL)), 
	CONSTRAINT fk_knob_steps_campaign_id FOREIGN KEY(campaign_id) REFERENCES analyses (campaign_id) ON DELETE CASCADE, 
	CONSTRAINT fk_knob_steps_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE SET NULL
);
INSERT INTO "knob_steps" VALUES(2,'tp','down','1','1','dp,num_microbatches','n1-tp2-pp1-dp1-vpp1-mbs1-mb1-z0-rc_none-sp0-fp32','predicted','out_of_memory',NULL,NULL,NULL);
INSERT INTO "knob_steps" VALUES(2,'tp','up','1','2','dp,num_microbatches','n1-tp2-pp1-dp1-vpp1-mbs1-mb1-z0-rc_none-sp0-fp32','measured','completed',-0.1,1,4);
CREATE TABLE measurements (
	trial_id INTEGER NOT NULL, 
	campaign_id INTEGER NOT NULL, 
	step_time_s DOUBLE NOT NULL, 
	tokens_per_step BIGINT NOT NULL, 
	tokens_per_s DOUBLE NOT NULL, 
	tokens_per_s_per_device DOUBLE NOT NULL, 
	model_tflops_per_device DOUBLE NOT NULL, 
	hardware_tflops_per_device DOUBLE NOT NULL, 
	oversubscribed BOOLEAN NOT NULL, warmup_settled BOOLEAN, kin INTEGER, shortened BOOLEAN DEFAULT 0 NOT NULL, iterations_asked INTEGER, step_time_q25_s DOUBLE, step_time_q75_s DOUBLE, peak_tflops_per_device DOUBLE, peak_source VARCHAR(200), mfu DOUBLE, hfu DOUBLE, peak_memory_bytes BIGINT, memory_kind VARCHAR(40), skipped_steps INTEGER, 
	CONSTRAINT pk_measurements PRIMARY KEY (trial_id), 
	CONSTRAINT fk_measurements_trial_id_campaign_id FOREIGN KEY(trial_id, campaign_id) REFERENCES trials (id, campaign_id) ON DELETE CASCADE
);
INSERT INTO "measurements" VALUES(1,1,0.512,512,1000.0,1000.0,1.0,1.11111111111111116045e+00,0,1,1,0,NULL,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(2,1,0.512,512,1000.0,1000.0,1.0,1.11111111111111116045e+00,0,1,2,0,NULL,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(3,1,0.512,512,1000.0,1000.0,1.0,1.11111111111111116045e+00,0,1,1,0,NULL,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(4,2,0.512,512,1000.0,1000.0,1.0,1.11111111111111116045e+00,0,1,4,0,NULL,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(5,2,0.512,512,1000.0,1000.0,1.0,1.11111111111111116045e+00,0,1,4,1,9,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(6,3,0.4,4096,10240.0,1280.0,0.25769803776,0.25769803776,0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,2000000000,NULL,NULL);
INSERT INTO "measurements" VALUES(7,3,4.1300000000000003375e-01,4096,9.91767554479418868111e+03,1.23970944309927358513e+03,2.4958647724939464485e-01,2.4958647724939464485e-01,0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,2000000000,NULL,NULL);
INSERT INTO "measurements" VALUES(8,3,4.26000000000000045297e-01,4096,9.61502347417840246609e+03,1.20187793427230030826e+03,2.4196998850704223849e-01,2.4196998850704223849e-01,0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,2000000000,NULL,NULL);
INSERT INTO "measurements" VALUES(9,3,0.439,4096,9.33029612756264214133e+03,1.16628701594533026766e+03,2.34804590214122976821e-01,2.34804590214122976821e-01,0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,2000000000,NULL,NULL);
INSERT INTO "measurements" VALUES(12,3,0.45,4096,9.10222222222222262632e+03,1.13777777777777782829e+03,2.29064922453333347229e-01,2.29064922453333347229e-01,0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "measurements" VALUES(13,3,0.5,4096,8192.0,1024.0,0.206158430208,0.206158430208,0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,2000000000,NULL,NULL);
INSERT INTO "measurements" VALUES(14,4,0.512,512,1000.0,1000.0,1.0,1.11111111111111116045e+00,0,1,14,0,NULL,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(15,4,3.79259259259259240426e-01,512,1350.0,1350.0,1.35,1.5,0,1,14,0,NULL,3.03407407407407403443e-01,4.55111111111111077409e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(16,4,4.49122807017543868024e-01,512,1140.0,1140.0,1.14,1.26666666666666660745e+00,0,1,14,0,NULL,3.59298245614035116624e-01,5.38947368421052619424e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(17,4,3.43624161073825484802e-01,512,1490.0,745.0,1.49,1.655555555555555447e+00,0,1,14,0,NULL,2.74899328859060376739e-01,4.12348993288590592865e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(18,4,0.4,512,1280.0,640.0,1.28,1.42222222222222227649e+00,0,1,14,0,NULL,3.20000000000000062172e-01,0.48,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(19,4,4.785046728971962815e-01,512,1070.0,535.0,1.07,1.18888888888888888395e+00,0,1,14,0,NULL,3.82803738317757047404e-01,5.74205607476635515595e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(20,4,3.60563380281690160078e-01,512,1420.0,355.0,1.42,1.5777777777777777235e+00,0,1,14,0,NULL,2.88450704225352128062e-01,4.32676056338028192094e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(21,4,4.23140495867768584581e-01,512,1210.0,302.5,1.21,1.34444444444444455299e+00,0,1,14,0,NULL,3.38512396694214900971e-01,5.07768595041322323702e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(22,4,4.60846084608460826448e-01,512,1111.0,277.75,1.111,1.23444444444444445529e+00,0,1,14,0,NULL,3.68676867686768661158e-01,0.553015301530153,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(25,4,0.512,512,1000.0,500.0,1.0,1.11111111111111116045e+00,0,1,14,0,NULL,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(28,6,0.512,512,1000.0,500.0,1.0,1.11111111111111116045e+00,0,1,28,0,NULL,0.4096,0.6144,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(30,7,5.68888888888888888395e-01,512,900.0,900.0,0.9,1.0,0,1,30,0,NULL,4.5511111111111113292e-01,6.8266666666666664387e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(31,7,0.562019758507135,512,911.0,911.0,0.911,1.01222222222222213439e+00,0,1,30,0,NULL,4.49615806805708062565e-01,6.74423710208562066092e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(32,7,5.55314533622559669545e-01,512,922.0,922.0,0.922,1.02444444444444449082e+00,0,1,30,0,NULL,4.4425162689804775784e-01,6.6637744034707158125e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(33,7,5.48767416934619500779e-01,512,933.0,466.5,0.933,1.03666666666666662521e+00,0,1,30,0,NULL,4.39013933547695633929e-01,6.58520900321543423139e-01,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
CREATE TABLE stage_memories (
	trial_id INTEGER NOT NULL, 
	stage INTEGER NOT NULL, 
	peak_memory_bytes BIGINT NOT NULL, peak_reserved_bytes BIGINT, 
	CONSTRAINT pk_stage_memories PRIMARY KEY (trial_id, stage), 
	CONSTRAINT fk_stage_memories_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);
INSERT INTO "stage_memories" VALUES(1,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(2,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(3,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(4,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(5,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(14,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(15,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(16,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(17,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(18,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(19,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(20,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(21,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(22,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(25,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(25,1,5368709119,NULL);
INSERT INTO "stage_memories" VALUES(28,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(30,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(31,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(32,0,5368709120,NULL);
INSERT INTO "stage_memories" VALUES(33,0,5368709120,NULL);
CREATE TABLE trial_logs (
	trial_id INTEGER NOT NULL, 
	tail TEXT NOT NULL, 
	CONSTRAINT pk_trial_logs PRIMARY KEY (trial_id), 
	CONSTRAINT fk_trial_logs_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);
INSERT INTO "trial_logs" VALUES(1,'the last line
');
INSERT INTO "trial_logs" VALUES(2,'the last line
');
INSERT INTO "trial_logs" VALUES(3,'the last line
');
INSERT INTO "trial_logs" VALUES(4,'the last line
');
INSERT INTO "trial_logs" VALUES(5,'the last line
');
INSERT INTO "trial_logs" VALUES(14,'the last line
');
INSERT INTO "trial_logs" VALUES(15,'the last line
');
INSERT INTO "trial_logs" VALUES(16,'the last line
');
INSERT INTO "trial_logs" VALUES(17,'the last line
');
INSERT INTO "trial_logs" VALUES(18,'the last line
');
INSERT INTO "trial_logs" VALUES(19,'the last line
');
INSERT INTO "trial_logs" VALUES(20,'the last line
');
INSERT INTO "trial_logs" VALUES(21,'the last line
');
INSERT INTO "trial_logs" VALUES(22,'the last line
');
INSERT INTO "trial_logs" VALUES(23,'Traceback ...');
INSERT INTO "trial_logs" VALUES(24,'Traceback ...');
INSERT INTO "trial_logs" VALUES(25,'the last line
');
INSERT INTO "trial_logs" VALUES(28,'the last line
');
INSERT INTO "trial_logs" VALUES(30,'the last line
');
INSERT INTO "trial_logs" VALUES(31,'the last line
');
INSERT INTO "trial_logs" VALUES(32,'the last line
');
INSERT INTO "trial_logs" VALUES(33,'the last line
');
CREATE TABLE trials (
	id INTEGER NOT NULL, 
	campaign_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	layout_key VARCHAR(120) NOT NULL, 
	repeat_index INTEGER NOT NULL, 
	repeat_of INTEGER, 
	num_nodes INTEGER NOT NULL, 
	tp INTEGER NOT NULL, 
	pp INTEGER NOT NULL, 
	dp INTEGER NOT NULL, 
	vpp INTEGER NOT NULL, 
	micro_batch_size INTEGER NOT NULL, 
	num_microbatches INTEGER NOT NULL, 
	zero_stage INTEGER NOT NULL, 
	recompute VARCHAR(16) NOT NULL, 
	sequence_parallel BOOLEAN NOT NULL, 
	precision VARCHAR(8) NOT NULL, 
	num_devices INTEGER NOT NULL, 
	global_batch_size INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason VARCHAR(40), 
	message TEXT NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	cancel_requested BOOLEAN NOT NULL, 
	attempt INTEGER NOT NULL, 
	lost_attempts INTEGER NOT NULL, 
	iterations_done INTEGER NOT NULL, 
	worker_id VARCHAR(32), 
	lease_expires_at DATETIME, 
	node_seconds DOUBLE NOT NULL, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	ended_seq INTEGER, zero_replicas INTEGER DEFAULT '1' NOT NULL, 
	CONSTRAINT pk_trials PRIMARY KEY (id), 
	CONSTRAINT ck_trials_running_has_a_lease CHECK ((state = 'RUNNING') = (worker_id IS NOT NULL AND lease_expires_at IS NOT NULL)), 
	CONSTRAINT ck_trials_reason_goes_with_state CHECK ((state IN ('INFEASIBLE', 'FAILED', 'CANCELLED')) = (reason IS NOT NULL)), 
	CONSTRAINT ck_trials_ended_has_a_time CHECK ((state IN ('PENDING', 'RUNNING')) = (ended_at IS NULL)), 
	CONSTRAINT ck_trials_state CHECK (state IN ('PENDING', 'RUNNING', 'COMPLETED', 'INFEASIBLE', 'FAILED', 'CANCELLED')), 
	CONSTRAINT ck_trials_ended_has_a_place CHECK ((ended_at IS NULL) = (ended_seq IS NULL)), 
	CONSTRAINT ck_trials_repeat_is_explicit CHECK ((repeat_index = 0) = (repeat_of IS NULL)), 
	CONSTRAINT ck_trials_global_batch_size CHECK (global_batch_size = dp * micro_batch_size * num_microbatches), 
	CONSTRAINT ck_trials_num_devices CHECK (num_devices = tp * pp * dp), 
	CONSTRAINT fk_trials_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id) ON DELETE CASCADE, 
	CONSTRAINT fk_trials_repeat_of FOREIGN KEY(repeat_of) REFERENCES trials (id) ON DELETE CASCADE, 
	CONSTRAINT fk_trials_worker_id FOREIGN KEY(worker_id) REFERENCES workers (id), 
	CONSTRAINT uq_trials_campaign_id_ended_seq UNIQUE (campaign_id, ended_seq), 
	CONSTRAINT uq_trials_campaign_id_layout_key_repeat_index UNIQUE (campaign_id, layout_key, repeat_index), 
	CONSTRAINT uq_trials_campaign_id_number UNIQUE (campaign_id, number), 
	CONSTRAINT uq_trials_id_campaign_id UNIQUE (id, campaign_id)
);
INSERT INTO "trials" VALUES(1,1,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:00.000000','2026-01-01 12:01:01.000000','2026-01-01 12:01:05.000000',1,1);
INSERT INTO "trials" VALUES(2,1,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'FAILED','diverged','loss 9 of trial 2 at iteration 0 is off the 6 of trial 1 by more than 0.0001 of it, which is what fp32 allows there; several layouts agree with trial 1','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:05.000000','2026-01-01 12:01:06.000000','2026-01-01 12:01:10.000000',2,1);
INSERT INTO "trials" VALUES(3,1,3,'n1-tp1-pp1-dp1-vpp1-mbs4-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,4,4,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:10.000000','2026-01-01 12:01:11.000000','2026-01-01 12:01:15.000000',3,1);
INSERT INTO "trials" VALUES(4,2,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:02:15.000000','2026-01-01 12:02:16.000000','2026-01-01 12:02:20.000000',1,1);
INSERT INTO "trials" VALUES(5,2,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:02:20.000000','2026-01-01 12:02:21.000000','2026-01-01 12:02:25.000000',2,1);
INSERT INTO "trials" VALUES(6,3,1,'n2-tp1-pp1-dp8-vpp1-mbs1-mb1-z0-rc_none-sp0-bf16',0,NULL,2,1,1,8,1,1,1,0,'none',0,'bf16',8,8,'COMPLETED',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',1,1);
INSERT INTO "trials" VALUES(7,3,2,'n2-tp1-pp2-dp4-vpp1-mbs1-mb2-z0-rc_none-sp0-bf16',0,NULL,2,1,2,4,1,1,2,0,'none',0,'bf16',8,8,'COMPLETED',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',2,1);
INSERT INTO "trials" VALUES(8,3,3,'n2-tp1-pp2-dp4-vpp1-mbs2-mb1-z0-rc_none-sp0-bf16',0,NULL,2,1,2,4,1,2,1,0,'none',0,'bf16',8,8,'COMPLETED',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',3,1);
INSERT INTO "trials" VALUES(9,3,4,'n2-tp2-pp1-dp4-vpp1-mbs1-mb2-z0-rc_none-sp0-bf16',0,NULL,2,2,1,4,1,1,2,0,'none',0,'bf16',8,8,'COMPLETED',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',4,1);
INSERT INTO "trials" VALUES(10,3,5,'n2-tp2-pp1-dp4-vpp1-mbs2-mb1-z0-rc_none-sp0-bf16',0,NULL,2,2,1,4,1,2,1,0,'none',0,'bf16',8,8,'INFEASIBLE','out_of_memory','','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',5,1);
INSERT INTO "trials" VALUES(11,3,6,'n2-tp2-pp2-dp2-vpp1-mbs1-mb4-z0-rc_none-sp0-bf16',0,NULL,2,2,2,2,1,1,4,0,'none',0,'bf16',8,8,'FAILED','unstated','the imported table says that it failed, and not why','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',6,1);
INSERT INTO "trials" VALUES(12,3,7,'n2-tp1-pp1-dp8-vpp1-mbs1-mb1-z0-rc_none-sp0-bf16',1,6,2,1,1,8,1,1,1,0,'none',0,'bf16',8,8,'COMPLETED',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',7,1);
INSERT INTO "trials" VALUES(13,3,8,'n2-tp2-pp2-dp2-vpp1-mbs2-mb2-z0-rc_none-sp0-bf16',0,NULL,2,2,2,2,1,2,2,0,'none',0,'bf16',8,8,'COMPLETED',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:02:25.000000',NULL,'2026-01-01 12:02:25.000000',8,1);
INSERT INTO "trials" VALUES(14,4,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:03:25.000000','2026-01-01 12:03:26.000000','2026-01-01 12:03:30.000000',1,1);
INSERT INTO "trials" VALUES(15,4,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:03:30.000000','2026-01-01 12:03:31.000000','2026-01-01 12:03:35.000000',2,1);
INSERT INTO "trials" VALUES(16,4,3,'n1-tp1-pp1-dp1-vpp1-mbs4-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,4,4,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:03:35.000000','2026-01-01 12:03:36.000000','2026-01-01 12:03:40.000000',3,1);
INSERT INTO "trials" VALUES(17,4,4,'n1-tp1-pp1-dp2-vpp1-mbs1-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,1,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:03:40.000000','2026-01-01 12:03:41.000000','2026-01-01 12:03:45.000000',4,1);
INSERT INTO "trials" VALUES(18,4,5,'n1-tp1-pp1-dp2-vpp1-mbs2-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,2,4,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:03:45.000000','2026-01-01 12:03:46.000000','2026-01-01 12:03:50.000000',5,1);
INSERT INTO "trials" VALUES(19,4,6,'n1-tp1-pp1-dp2-vpp1-mbs4-mb2-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,4,2,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:03:50.000000','2026-01-01 12:03:51.000000','2026-01-01 12:03:55.000000',6,1);
INSERT INTO "trials" VALUES(20,4,7,'n1-tp1-pp1-dp4-vpp1-mbs1-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,1,4,0,'none',0,'fp32',4,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:03:55.000000','2026-01-01 12:03:56.000000','2026-01-01 12:04:00.000000',7,1);
INSERT INTO "trials" VALUES(21,4,8,'n1-tp1-pp1-dp4-vpp1-mbs2-mb2-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,2,2,0,'none',0,'fp32',4,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:04:00.000000','2026-01-01 12:04:01.000000','2026-01-01 12:04:05.000000',8,1);
INSERT INTO "trials" VALUES(22,4,9,'n1-tp1-pp1-dp4-vpp1-mbs2-mb2-z0-rc_none-sp0-fp32',1,21,1,1,1,4,1,2,2,0,'none',0,'fp32',4,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:04:05.000000','2026-01-01 12:04:06.000000','2026-01-01 12:04:10.000000',9,1);
INSERT INTO "trials" VALUES(23,4,10,'n1-tp1-pp1-dp4-vpp1-mbs4-mb1-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,4,1,0,'none',0,'fp32',4,16,'INFEASIBLE','out_of_memory','rank 1 of 2: out_of_memory','node-1',0,1,0,0,NULL,NULL,4.0,'2026-01-01 12:04:10.000000','2026-01-01 12:04:11.000000','2026-01-01 12:04:15.000000',10,1);
INSERT INTO "trials" VALUES(24,4,11,'n1-tp1-pp2-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,2,1,1,1,16,0,'none',0,'fp32',2,16,'FAILED','crashed','rank 1 of 2: crashed','node-1',0,1,0,0,NULL,NULL,4.0,'2026-01-01 12:04:15.000000','2026-01-01 12:04:16.000000','2026-01-01 12:04:20.000000',11,1);
INSERT INTO "trials" VALUES(25,4,12,'n1-tp1-pp2-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,2,1,1,2,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,2,1,5,NULL,NULL,4.0,'2026-01-01 12:04:20.000000','2026-01-01 12:04:21.000000','2026-01-01 12:06:05.000000',12,1);
INSERT INTO "trials" VALUES(26,5,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'CANCELLED','cancelled','rank 1 of 2: cancelled','',1,1,0,0,NULL,NULL,4.0,'2026-01-01 12:07:05.000000','2026-01-01 12:07:06.000000','2026-01-01 12:07:06.000000',2,1);
INSERT INTO "trials" VALUES(27,5,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'CANCELLED','cancelled','the campaign ended: cancelled by the user','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:07:05.000000',NULL,'2026-01-01 12:07:06.000000',1,1);
INSERT INTO "trials" VALUES(28,6,1,'n1-tp1-pp1-dp2-vpp1-mbs1-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,1,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:08:06.000000','2026-01-01 12:08:07.000000','2026-01-01 12:08:11.000000',1,1);
INSERT INTO "trials" VALUES(29,6,2,'n1-tp1-pp1-dp2-vpp1-mbs2-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,2,4,0,'none',0,'fp32',2,16,'PENDING',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:08:11.000000',NULL,NULL,NULL,1);
INSERT INTO "trials" VALUES(30,7,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:09:11.000000','2026-01-01 12:09:12.000000','2026-01-01 12:09:16.000000',1,1);
INSERT INTO "trials" VALUES(31,7,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:09:16.000000','2026-01-01 12:09:17.000000','2026-01-01 12:09:21.000000',2,1);
INSERT INTO "trials" VALUES(32,7,3,'n1-tp1-pp1-dp1-vpp1-mbs4-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,4,4,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:09:21.000000','2026-01-01 12:09:22.000000','2026-01-01 12:09:26.000000',3,1);
INSERT INTO "trials" VALUES(33,7,4,'n1-tp1-pp1-dp2-vpp1-mbs1-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,1,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:09:26.000000','2026-01-01 12:09:27.000000','2026-01-01 12:09:31.000000',4,1);
INSERT INTO "trials" VALUES(34,7,5,'n1-tp1-pp1-dp2-vpp1-mbs4-mb2-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,4,2,0,'none',0,'fp32',2,16,'RUNNING',NULL,'','',0,1,0,2,'8ab4b4b59e9b4254957202461d0762a1','2026-01-01 12:09:47.000000',0.0,'2026-01-01 12:09:31.000000','2026-01-01 12:09:32.000000',NULL,NULL,1);
INSERT INTO "trials" VALUES(35,7,6,'n1-tp1-pp1-dp4-vpp1-mbs1-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,1,4,0,'none',0,'fp32',4,16,'PENDING',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:09:32.000000',NULL,NULL,NULL,1);
CREATE TABLE workers (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	cluster VARCHAR(200) NOT NULL, 
	num_nodes INTEGER NOT NULL, 
	devices_per_node INTEGER NOT NULL, 
	device VARCHAR(255) NOT NULL, 
	versions JSON NOT NULL, 
	registered_at DATETIME NOT NULL, 
	seen_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	CONSTRAINT pk_workers PRIMARY KEY (id), 
	CONSTRAINT ck_workers_holds_devices CHECK (num_nodes >= 1 AND devices_per_node >= 1)
);
INSERT INTO "workers" VALUES('8ab4b4b59e9b4254957202461d0762a1','w1','node-1','box',2,4,'CPU core','{"python": "3.11"}','2026-01-01 12:00:00.000000','2026-01-01 12:09:32.000000',NULL);
CREATE INDEX ix_campaigns_cluster_name ON campaigns (cluster_name);
CREATE INDEX ix_campaigns_state ON campaigns (state);
CREATE INDEX ix_workers_cluster_seen_at ON workers (cluster, seen_at);
CREATE UNIQUE INDEX uq_workers_name_live ON workers (name) WHERE ended_at IS NULL;
CREATE INDEX ix_trials_campaign_id_state ON trials (campaign_id, state);
CREATE INDEX ix_trials_repeat_of ON trials (repeat_of);
CREATE INDEX ix_trials_state_id ON trials (state, id);
CREATE INDEX ix_trials_worker_id ON trials (worker_id);
CREATE INDEX ix_attempts_worker_id ON attempts (worker_id);
CREATE INDEX ix_measurements_campaign_id_hardware_tflops_per_device ON measurements (campaign_id, hardware_tflops_per_device);
CREATE INDEX ix_measurements_campaign_id_model_tflops_per_device ON measurements (campaign_id, model_tflops_per_device);
CREATE INDEX ix_measurements_campaign_id_tokens_per_s ON measurements (campaign_id, tokens_per_s);
CREATE INDEX ix_measurements_campaign_id_tokens_per_s_per_device ON measurements (campaign_id, tokens_per_s_per_device);
CREATE INDEX ix_analyses_winner_id ON analyses (winner_id);
COMMIT;
