BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
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
INSERT INTO "attempts" VALUES(1,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:01.000000','2026-01-01 12:01:05.000000','2026-01-01 12:01:05.000000','reported',4.0);
INSERT INTO "attempts" VALUES(2,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:06.000000','2026-01-01 12:01:10.000000','2026-01-01 12:01:10.000000','reported',4.0);
INSERT INTO "attempts" VALUES(3,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:11.000000','2026-01-01 12:01:15.000000','2026-01-01 12:01:15.000000','reported',4.0);
INSERT INTO "attempts" VALUES(4,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:16.000000','2026-01-01 12:01:20.000000','2026-01-01 12:01:20.000000','reported',4.0);
INSERT INTO "attempts" VALUES(5,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:21.000000','2026-01-01 12:01:25.000000','2026-01-01 12:01:25.000000','reported',4.0);
INSERT INTO "attempts" VALUES(6,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:26.000000','2026-01-01 12:01:30.000000','2026-01-01 12:01:30.000000','reported',4.0);
INSERT INTO "attempts" VALUES(7,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:31.000000','2026-01-01 12:01:35.000000','2026-01-01 12:01:35.000000','reported',4.0);
INSERT INTO "attempts" VALUES(8,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:36.000000','2026-01-01 12:01:40.000000','2026-01-01 12:01:40.000000','reported',4.0);
INSERT INTO "attempts" VALUES(9,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:41.000000','2026-01-01 12:01:45.000000','2026-01-01 12:01:45.000000','reported',4.0);
INSERT INTO "attempts" VALUES(10,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:46.000000','2026-01-01 12:01:50.000000','2026-01-01 12:01:50.000000','reported',4.0);
INSERT INTO "attempts" VALUES(11,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:51.000000','2026-01-01 12:01:55.000000','2026-01-01 12:01:55.000000','reported',4.0);
INSERT INTO "attempts" VALUES(12,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:01:56.000000','2026-01-01 12:01:56.000000','2026-01-01 12:03:36.000000','lost',0.0);
INSERT INTO "attempts" VALUES(12,2,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:03:37.000000','2026-01-01 12:03:40.000000','2026-01-01 12:03:40.000000','reported',4.0);
INSERT INTO "attempts" VALUES(13,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:04:41.000000','2026-01-01 12:04:41.000000','2026-01-01 12:04:41.000000','reported',4.0);
INSERT INTO "attempts" VALUES(15,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:05:42.000000','2026-01-01 12:05:46.000000','2026-01-01 12:05:46.000000','reported',4.0);
INSERT INTO "attempts" VALUES(17,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:06:47.000000','2026-01-01 12:06:51.000000','2026-01-01 12:06:51.000000','reported',4.0);
INSERT INTO "attempts" VALUES(18,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:06:52.000000','2026-01-01 12:06:56.000000','2026-01-01 12:06:56.000000','reported',4.0);
INSERT INTO "attempts" VALUES(19,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:06:57.000000','2026-01-01 12:07:01.000000','2026-01-01 12:07:01.000000','reported',4.0);
INSERT INTO "attempts" VALUES(20,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:07:02.000000','2026-01-01 12:07:06.000000','2026-01-01 12:07:06.000000','reported',4.0);
INSERT INTO "attempts" VALUES(21,1,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:07:07.000000','2026-01-01 12:07:07.000000',NULL,NULL,0.0);
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
	clock_at DATETIME, 
	CONSTRAINT pk_campaigns PRIMARY KEY (id), 
	CONSTRAINT ck_campaigns_ended_has_a_time CHECK ((state IN ('RUNNING', 'PAUSED')) = (ended_at IS NULL)), 
	CONSTRAINT ck_campaigns_ended_has_a_reason CHECK ((state IN ('RUNNING', 'PAUSED')) = (reason IS NULL)), 
	CONSTRAINT ck_campaigns_state CHECK (state IN ('RUNNING', 'PAUSED', 'COMPLETED', 'CANCELLED', 'FAILED')), 
	CONSTRAINT ck_campaigns_costs_not_negative CHECK (node_seconds >= 0 AND wall_time_s >= 0), 
	CONSTRAINT uq_campaigns_name UNIQUE (name)
);
INSERT INTO "campaigns" VALUES(1,'pilot','COMPLETED','budget','40 of 40 trials done','{"name": "pilot", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0}, "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,12,12,'2026-01-01 12:01:00.000000','2026-01-01 12:01:01.000000','2026-01-01 12:03:40.000000',48.0,15.0,NULL);
INSERT INTO "campaigns" VALUES(2,'given-up','CANCELLED','cancelled','cancelled by the user','{"name": "given-up", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0}, "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,2,2,'2026-01-01 12:04:40.000000','2026-01-01 12:04:41.000000','2026-01-01 12:04:41.000000',4.0,1.0,NULL);
INSERT INTO "campaigns" VALUES(3,'on-hold','PAUSED',NULL,'','{"name": "on-hold", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "strategy": "random", "seed": 7, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0}, "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,2,1,'2026-01-01 12:05:41.000000','2026-01-01 12:05:42.000000',NULL,4.0,5.0,NULL);
INSERT INTO "campaigns" VALUES(4,'at-work','RUNNING',NULL,'','{"name": "at-work", "model": {"name": "tiny", "family": "gpt", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 4, "seq_length": 128, "vocab_size": 1024, "tied_embeddings": false}, "cluster": {"name": "box", "device": "CPU core", "num_nodes": 2, "devices_per_node": 4, "device_memory_bytes": 8589934592, "peak_flops_per_s": {}, "memory_bandwidth_bytes_per_s": 2000000000000.0, "intra_node_bandwidth_bytes_per_s": {"2": 200000000000.0, "4": 200000000000.0, "8": 200000000000.0}, "inter_node_bandwidth_bytes_per_s": 25000000000.0, "source": "generic constants"}, "space": {"global_batch_size": 16, "num_nodes": 1, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2, 4], "vpp": 1, "micro_batch_size": [1, 2, 4], "zero_stage": 0, "recompute": "none", "sequence_parallel": false, "precision": "fp32", "allow_tp_across_nodes": false}, "objective": "tokens_per_s", "strategy": "random", "seed": 8, "budget": {"trials": 40, "node_hours": null, "wall_time_s": null}, "probe": {"warmup": 2, "iterations": 3, "deadline_s": 300.0}, "warnings": ["cluster ''box'' is not a preset (local-cpu, frontier, perlmutter, a100-sxm, h100-sxm): generic constants stand in for memory_bandwidth_bytes_per_s=2000000000000.0, intra_node_bandwidth_bytes_per_s={2: 200000000000.0, 4: 200000000000.0, 8: 200000000000.0}, inter_node_bandwidth_bytes_per_s=25000000000.0"]}','tiny','box','tokens_per_s','random',24,6,4,'2026-01-01 12:06:46.000000','2026-01-01 12:06:47.000000',NULL,16.0,15.0,'2026-01-01 12:07:07.000000');
CREATE TABLE driver_beats (
	name VARCHAR(40) NOT NULL, 
	seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_driver_beats PRIMARY KEY (name)
);
INSERT INTO "driver_beats" VALUES('driver','2026-01-01 12:07:07.000000');
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
INSERT INTO "environments" VALUES(6,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(7,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(8,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(9,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(12,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(15,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(17,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(18,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(19,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
INSERT INTO "environments" VALUES(20,'node-1','CPU core','gloo','3.11.9','2.13.0','2.4','abc');
CREATE TABLE iterations (
	trial_id INTEGER NOT NULL, 
	"index" INTEGER NOT NULL, 
	kind VARCHAR(8) NOT NULL, 
	step_time_s DOUBLE NOT NULL, 
	loss DOUBLE NOT NULL, 
	grad_norm DOUBLE NOT NULL, 
	CONSTRAINT pk_iterations PRIMARY KEY (trial_id, "index"), 
	CONSTRAINT ck_iterations_kind CHECK (kind IN ('warmup', 'timed')), 
	CONSTRAINT fk_iterations_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);
INSERT INTO "iterations" VALUES(1,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(1,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(1,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(1,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(1,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(2,0,'warmup',3.79259259259259240426e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(2,1,'warmup',3.79259259259259240426e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(2,2,'timed',3.79259259259259240426e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(2,3,'timed',3.79259259259259240426e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(2,4,'timed',3.79259259259259240426e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(3,0,'warmup',4.49122807017543868024e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(3,1,'warmup',4.49122807017543868024e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(3,2,'timed',4.49122807017543868024e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(3,3,'timed',4.49122807017543868024e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(3,4,'timed',4.49122807017543868024e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(4,0,'warmup',3.43624161073825484802e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(4,1,'warmup',3.43624161073825484802e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(4,2,'timed',3.43624161073825484802e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(4,3,'timed',3.43624161073825484802e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(4,4,'timed',3.43624161073825484802e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(5,0,'warmup',0.4,6.0,1.5);
INSERT INTO "iterations" VALUES(5,1,'warmup',0.4,5.9,1.5);
INSERT INTO "iterations" VALUES(5,2,'timed',0.4,5.8,1.5);
INSERT INTO "iterations" VALUES(5,3,'timed',0.4,5.7,1.5);
INSERT INTO "iterations" VALUES(5,4,'timed',0.4,5.6,1.5);
INSERT INTO "iterations" VALUES(6,0,'warmup',4.785046728971962815e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(6,1,'warmup',4.785046728971962815e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(6,2,'timed',4.785046728971962815e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(6,3,'timed',4.785046728971962815e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(6,4,'timed',4.785046728971962815e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(7,0,'warmup',3.60563380281690160078e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(7,1,'warmup',3.60563380281690160078e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(7,2,'timed',3.60563380281690160078e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(7,3,'timed',3.60563380281690160078e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(7,4,'timed',3.60563380281690160078e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(8,0,'warmup',4.23140495867768584581e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(8,1,'warmup',4.23140495867768584581e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(8,2,'timed',4.23140495867768584581e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(8,3,'timed',4.23140495867768584581e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(8,4,'timed',4.23140495867768584581e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(9,0,'warmup',4.60846084608460826448e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(9,1,'warmup',4.60846084608460826448e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(9,2,'timed',4.60846084608460826448e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(9,3,'timed',4.60846084608460826448e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(9,4,'timed',4.60846084608460826448e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(12,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(12,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(12,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(12,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(12,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(15,0,'warmup',0.512,6.0,1.5);
INSERT INTO "iterations" VALUES(15,1,'warmup',0.512,5.9,1.5);
INSERT INTO "iterations" VALUES(15,2,'timed',0.512,5.8,1.5);
INSERT INTO "iterations" VALUES(15,3,'timed',0.512,5.7,1.5);
INSERT INTO "iterations" VALUES(15,4,'timed',0.512,5.6,1.5);
INSERT INTO "iterations" VALUES(17,0,'warmup',5.68888888888888888395e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(17,1,'warmup',5.68888888888888888395e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(17,2,'timed',5.68888888888888888395e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(17,3,'timed',5.68888888888888888395e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(17,4,'timed',5.68888888888888888395e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(18,0,'warmup',0.562019758507135,6.0,1.5);
INSERT INTO "iterations" VALUES(18,1,'warmup',0.562019758507135,5.9,1.5);
INSERT INTO "iterations" VALUES(18,2,'timed',0.562019758507135,5.8,1.5);
INSERT INTO "iterations" VALUES(18,3,'timed',0.562019758507135,5.7,1.5);
INSERT INTO "iterations" VALUES(18,4,'timed',0.562019758507135,5.6,1.5);
INSERT INTO "iterations" VALUES(19,0,'warmup',5.55314533622559669545e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(19,1,'warmup',5.55314533622559669545e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(19,2,'timed',5.55314533622559669545e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(19,3,'timed',5.55314533622559669545e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(19,4,'timed',5.55314533622559669545e-01,5.6,1.5);
INSERT INTO "iterations" VALUES(20,0,'warmup',5.48767416934619500779e-01,6.0,1.5);
INSERT INTO "iterations" VALUES(20,1,'warmup',5.48767416934619500779e-01,5.9,1.5);
INSERT INTO "iterations" VALUES(20,2,'timed',5.48767416934619500779e-01,5.8,1.5);
INSERT INTO "iterations" VALUES(20,3,'timed',5.48767416934619500779e-01,5.7,1.5);
INSERT INTO "iterations" VALUES(20,4,'timed',5.48767416934619500779e-01,5.6,1.5);
CREATE TABLE measurements (
	trial_id INTEGER NOT NULL, 
	campaign_id INTEGER NOT NULL, 
	step_time_s DOUBLE NOT NULL, 
	step_time_q25_s DOUBLE NOT NULL, 
	step_time_q75_s DOUBLE NOT NULL, 
	tokens_per_step BIGINT NOT NULL, 
	tokens_per_s DOUBLE NOT NULL, 
	tokens_per_s_per_device DOUBLE NOT NULL, 
	model_tflops_per_device DOUBLE NOT NULL, 
	hardware_tflops_per_device DOUBLE NOT NULL, 
	peak_tflops_per_device DOUBLE NOT NULL, 
	peak_source VARCHAR(200) NOT NULL, 
	mfu DOUBLE NOT NULL, 
	hfu DOUBLE NOT NULL, 
	peak_memory_bytes BIGINT NOT NULL, 
	memory_kind VARCHAR(40) NOT NULL, 
	oversubscribed BOOLEAN NOT NULL, 
	CONSTRAINT pk_measurements PRIMARY KEY (trial_id), 
	CONSTRAINT fk_measurements_trial_id_campaign_id FOREIGN KEY(trial_id, campaign_id) REFERENCES trials (id, campaign_id) ON DELETE CASCADE
);
INSERT INTO "measurements" VALUES(1,1,0.512,0.4096,0.6144,512,1000.0,1000.0,1.0,1.11111111111111116045e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(2,1,3.79259259259259240426e-01,3.03407407407407403443e-01,4.55111111111111077409e-01,512,1350.0,1350.0,1.35,1.5,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(3,1,4.49122807017543868024e-01,3.59298245614035116624e-01,5.38947368421052619424e-01,512,1140.0,1140.0,1.14,1.26666666666666660745e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(4,1,3.43624161073825484802e-01,2.74899328859060376739e-01,4.12348993288590592865e-01,512,1490.0,745.0,1.49,1.655555555555555447e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(5,1,0.4,3.20000000000000062172e-01,0.48,512,1280.0,640.0,1.28,1.42222222222222227649e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(6,1,4.785046728971962815e-01,3.82803738317757047404e-01,5.74205607476635515595e-01,512,1070.0,535.0,1.07,1.18888888888888888395e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(7,1,3.60563380281690160078e-01,2.88450704225352128062e-01,4.32676056338028192094e-01,512,1420.0,355.0,1.42,1.5777777777777777235e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(8,1,4.23140495867768584581e-01,3.38512396694214900971e-01,5.07768595041322323702e-01,512,1210.0,302.5,1.21,1.34444444444444455299e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(9,1,4.60846084608460826448e-01,3.68676867686768661158e-01,0.553015301530153,512,1111.0,277.75,1.111,1.23444444444444445529e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(12,1,0.512,0.4096,0.6144,512,1000.0,500.0,1.0,1.11111111111111116045e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(15,3,0.512,0.4096,0.6144,512,1000.0,500.0,1.0,1.11111111111111116045e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(17,4,5.68888888888888888395e-01,4.5511111111111113292e-01,6.8266666666666664387e-01,512,900.0,900.0,0.9,1.0,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(18,4,0.562019758507135,4.49615806805708062565e-01,6.74423710208562066092e-01,512,911.0,911.0,0.911,1.01222222222222213439e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(19,4,5.55314533622559669545e-01,4.4425162689804775784e-01,6.6637744034707158125e-01,512,922.0,922.0,0.922,1.02444444444444449082e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
INSERT INTO "measurements" VALUES(20,4,5.48767416934619500779e-01,4.39013933547695633929e-01,6.58520900321543423139e-01,512,933.0,466.5,0.933,1.03666666666666662521e+00,10.0,'measured matmul (fp32)',0.1,0.12,5368709120,'logical',0);
CREATE TABLE stage_memories (
	trial_id INTEGER NOT NULL, 
	stage INTEGER NOT NULL, 
	peak_memory_bytes BIGINT NOT NULL, 
	CONSTRAINT pk_stage_memories PRIMARY KEY (trial_id, stage), 
	CONSTRAINT fk_stage_memories_trial_id FOREIGN KEY(trial_id) REFERENCES measurements (trial_id) ON DELETE CASCADE
);
INSERT INTO "stage_memories" VALUES(1,0,5368709120);
INSERT INTO "stage_memories" VALUES(2,0,5368709120);
INSERT INTO "stage_memories" VALUES(3,0,5368709120);
INSERT INTO "stage_memories" VALUES(4,0,5368709120);
INSERT INTO "stage_memories" VALUES(5,0,5368709120);
INSERT INTO "stage_memories" VALUES(6,0,5368709120);
INSERT INTO "stage_memories" VALUES(7,0,5368709120);
INSERT INTO "stage_memories" VALUES(8,0,5368709120);
INSERT INTO "stage_memories" VALUES(9,0,5368709120);
INSERT INTO "stage_memories" VALUES(12,0,5368709120);
INSERT INTO "stage_memories" VALUES(12,1,5368709119);
INSERT INTO "stage_memories" VALUES(15,0,5368709120);
INSERT INTO "stage_memories" VALUES(17,0,5368709120);
INSERT INTO "stage_memories" VALUES(18,0,5368709120);
INSERT INTO "stage_memories" VALUES(19,0,5368709120);
INSERT INTO "stage_memories" VALUES(20,0,5368709120);
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
INSERT INTO "trial_logs" VALUES(6,'the last line
');
INSERT INTO "trial_logs" VALUES(7,'the last line
');
INSERT INTO "trial_logs" VALUES(8,'the last line
');
INSERT INTO "trial_logs" VALUES(9,'the last line
');
INSERT INTO "trial_logs" VALUES(10,'Traceback ...');
INSERT INTO "trial_logs" VALUES(11,'Traceback ...');
INSERT INTO "trial_logs" VALUES(12,'the last line
');
INSERT INTO "trial_logs" VALUES(15,'the last line
');
INSERT INTO "trial_logs" VALUES(17,'the last line
');
INSERT INTO "trial_logs" VALUES(18,'the last line
');
INSERT INTO "trial_logs" VALUES(19,'the last line
');
INSERT INTO "trial_logs" VALUES(20,'the last line
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
	ended_seq INTEGER, 
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
INSERT INTO "trials" VALUES(1,1,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:00.000000','2026-01-01 12:01:01.000000','2026-01-01 12:01:05.000000',1);
INSERT INTO "trials" VALUES(2,1,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:05.000000','2026-01-01 12:01:06.000000','2026-01-01 12:01:10.000000',2);
INSERT INTO "trials" VALUES(3,1,3,'n1-tp1-pp1-dp1-vpp1-mbs4-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,4,4,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:10.000000','2026-01-01 12:01:11.000000','2026-01-01 12:01:15.000000',3);
INSERT INTO "trials" VALUES(4,1,4,'n1-tp1-pp1-dp2-vpp1-mbs1-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,1,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:15.000000','2026-01-01 12:01:16.000000','2026-01-01 12:01:20.000000',4);
INSERT INTO "trials" VALUES(5,1,5,'n1-tp1-pp1-dp2-vpp1-mbs2-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,2,4,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:20.000000','2026-01-01 12:01:21.000000','2026-01-01 12:01:25.000000',5);
INSERT INTO "trials" VALUES(6,1,6,'n1-tp1-pp1-dp2-vpp1-mbs4-mb2-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,4,2,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:25.000000','2026-01-01 12:01:26.000000','2026-01-01 12:01:30.000000',6);
INSERT INTO "trials" VALUES(7,1,7,'n1-tp1-pp1-dp4-vpp1-mbs1-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,1,4,0,'none',0,'fp32',4,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:30.000000','2026-01-01 12:01:31.000000','2026-01-01 12:01:35.000000',7);
INSERT INTO "trials" VALUES(8,1,8,'n1-tp1-pp1-dp4-vpp1-mbs2-mb2-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,2,2,0,'none',0,'fp32',4,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:35.000000','2026-01-01 12:01:36.000000','2026-01-01 12:01:40.000000',8);
INSERT INTO "trials" VALUES(9,1,9,'n1-tp1-pp1-dp4-vpp1-mbs2-mb2-z0-rc_none-sp0-fp32',1,8,1,1,1,4,1,2,2,0,'none',0,'fp32',4,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:01:40.000000','2026-01-01 12:01:41.000000','2026-01-01 12:01:45.000000',9);
INSERT INTO "trials" VALUES(10,1,10,'n1-tp1-pp1-dp4-vpp1-mbs4-mb1-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,4,1,0,'none',0,'fp32',4,16,'INFEASIBLE','out_of_memory','rank 1 of 2: out_of_memory','node-1',0,1,0,0,NULL,NULL,4.0,'2026-01-01 12:01:45.000000','2026-01-01 12:01:46.000000','2026-01-01 12:01:50.000000',10);
INSERT INTO "trials" VALUES(11,1,11,'n1-tp1-pp2-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,2,1,1,1,16,0,'none',0,'fp32',2,16,'FAILED','crashed','rank 1 of 2: crashed','node-1',0,1,0,0,NULL,NULL,4.0,'2026-01-01 12:01:50.000000','2026-01-01 12:01:51.000000','2026-01-01 12:01:55.000000',11);
INSERT INTO "trials" VALUES(12,1,12,'n1-tp1-pp2-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,2,1,1,2,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,2,1,5,NULL,NULL,4.0,'2026-01-01 12:01:55.000000','2026-01-01 12:01:56.000000','2026-01-01 12:03:40.000000',12);
INSERT INTO "trials" VALUES(13,2,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'CANCELLED','cancelled','rank 1 of 2: cancelled','',1,1,0,0,NULL,NULL,4.0,'2026-01-01 12:04:40.000000','2026-01-01 12:04:41.000000','2026-01-01 12:04:41.000000',2);
INSERT INTO "trials" VALUES(14,2,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'CANCELLED','cancelled','the campaign ended: cancelled by the user','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:04:40.000000',NULL,'2026-01-01 12:04:41.000000',1);
INSERT INTO "trials" VALUES(15,3,1,'n1-tp1-pp1-dp2-vpp1-mbs1-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,1,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:05:41.000000','2026-01-01 12:05:42.000000','2026-01-01 12:05:46.000000',1);
INSERT INTO "trials" VALUES(16,3,2,'n1-tp1-pp1-dp2-vpp1-mbs2-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,2,4,0,'none',0,'fp32',2,16,'PENDING',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:05:46.000000',NULL,NULL,NULL);
INSERT INTO "trials" VALUES(17,4,1,'n1-tp1-pp1-dp1-vpp1-mbs1-mb16-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,1,16,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:06:46.000000','2026-01-01 12:06:47.000000','2026-01-01 12:06:51.000000',1);
INSERT INTO "trials" VALUES(18,4,2,'n1-tp1-pp1-dp1-vpp1-mbs2-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,2,8,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:06:51.000000','2026-01-01 12:06:52.000000','2026-01-01 12:06:56.000000',2);
INSERT INTO "trials" VALUES(19,4,3,'n1-tp1-pp1-dp1-vpp1-mbs4-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,1,1,4,4,0,'none',0,'fp32',1,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:06:56.000000','2026-01-01 12:06:57.000000','2026-01-01 12:07:01.000000',3);
INSERT INTO "trials" VALUES(20,4,4,'n1-tp1-pp1-dp2-vpp1-mbs1-mb8-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,1,8,0,'none',0,'fp32',2,16,'COMPLETED',NULL,'','',0,1,0,5,NULL,NULL,4.0,'2026-01-01 12:07:01.000000','2026-01-01 12:07:02.000000','2026-01-01 12:07:06.000000',4);
INSERT INTO "trials" VALUES(21,4,5,'n1-tp1-pp1-dp2-vpp1-mbs4-mb2-z0-rc_none-sp0-fp32',0,NULL,1,1,1,2,1,4,2,0,'none',0,'fp32',2,16,'RUNNING',NULL,'','',0,1,0,2,'f972eddddc544eb1b121b5342aa3f2b0','2026-01-01 12:07:22.000000',0.0,'2026-01-01 12:07:06.000000','2026-01-01 12:07:07.000000',NULL,NULL);
INSERT INTO "trials" VALUES(22,4,6,'n1-tp1-pp1-dp4-vpp1-mbs1-mb4-z0-rc_none-sp0-fp32',0,NULL,1,1,1,4,1,1,4,0,'none',0,'fp32',4,16,'PENDING',NULL,'','',0,0,0,0,NULL,NULL,0.0,'2026-01-01 12:07:07.000000',NULL,NULL,NULL);
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
INSERT INTO "workers" VALUES('f972eddddc544eb1b121b5342aa3f2b0','w1','node-1','box',2,4,'CPU core','{"python": "3.11"}','2026-01-01 12:00:00.000000','2026-01-01 12:07:07.000000',NULL);
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
COMMIT;
